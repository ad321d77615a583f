"""A broken package of another vendor: every command ends with what is wrong, the package and a fix, by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from installed_package import install_package
from slow_cases import slow_but

from megalaunch.launch.failure import name_broken_backend
from megalaunch.platform.packages import Package, inspect_packages
from megalaunch.platform.plugins import PlatformError
from megalaunch.rundir.worker_failure import Failure

PLATFORM = """
from megalaunch.platform.platforms import PlatformFacts
from megalaunch.platform.plugins import PlatformPlugin

NO_CLASS = PlatformPlugin(PlatformFacts("warp", "wccl", "vendor.device:Absent", "WARP_VISIBLE_DEVICES", "torch_warp"))
"""
OVERRIDES = """
from megalaunch.platform.overrides import Override

NORM = "kernels.rms_norm.rms_norm"
ABSENT = (Override(NORM, "vendor.absent:rms_norm", "cpu"),)
NO_FUNCTION = (Override(NORM, "vendor.norm:rms", "cpu"),)
NARROW = (Override(NORM, "vendor.norm:narrow", "cpu"),)
BROKEN = (Override(NORM, "vendor.raises:rms_norm", "cpu"),)
"""
FILES = {
    "vendor/platform.py": PLATFORM,
    "vendor/overrides.py": OVERRIDES,
    "vendor/raises.py": "import warp_runtime\nfrom warp_runtime import rms_norm\n",
    "vendor/fails.py": "import warp_runtime\n",
    "vendor/device.py": "class WarpPlatform:\n    pass\n",
    "vendor/norm.py": "def narrow(x, weight: object):\n    return x\n",
}
COMMANDS = {
    "doctor": ("doctor", "--json"),
    "validate-config": ("validate-config", "recipe=tiny", "data.mock=true"),
    "plan": ("plan", "recipe=tiny", "data.mock=true"),
    "train": ("train", "recipe=tiny", "data.mock=true", "--dry-run"),
    "platform": ("platform", "check"),
    "run": ("train", "recipe=tiny", "data.mock=true", "platform=cpu", "train.steps=1"),
}
GROUPS = {"overrides": "megalaunch.overrides", "autoload": "torch.backends"}
QUICK = ("validate-config", "plan", "train")
RELEASE = (pytest.mark.slow, pytest.mark.release)
"""Of further commands with an entry that another command names already."""
REPAIR = "repair or uninstall that package"
ON_CPU = "(vendor 1.0), which replaces kernels.rms_norm.rms_norm on cpu,"


def run_command(site: Path, name: str, entry: str) -> tuple[int, str]:
    """Run a command beside the package vendor, and return its exit code and what it says is wrong."""
    group = next((group for word, group in GROUPS.items() if word in entry), "megalaunch.platforms")
    install_package(site, FILES, {group: {"warp": entry}})
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "megalaunch", *COMMANDS[name]],
        cwd=site,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    text = done.stdout + done.stderr
    assert "Traceback" not in text
    if name == "doctor":
        (problem,) = json.loads(done.stdout)["problems"]
        text = f"{problem['problem']}; {problem['fix']}"
    return done.returncode, " ".join(text.split())  # findings are wrapped


CASES = {
    "vendor.fails:PLUGIN": "the platform warp of vendor cannot be loaded: ModuleNotFoundError: No module named",
    "vendor.platform:NO_CLASS": "the platform warp of vendor names the class vendor.device:Absent, but vendor.device "
    "has no Absent",
    "vendor.overrides:ABSENT": f"vendor.absent:rms_norm {ON_CPU} cannot be imported: there is no module vendor.absent",
    "vendor.overrides:NO_FUNCTION": f"vendor.norm:rms {ON_CPU} cannot be imported: vendor.norm has no rms",
    "vendor.overrides:NARROW": f"vendor.norm:narrow {ON_CPU} takes (x, weight), not (x, weight, epsilon)",
    "vendor.overrides:BROKEN": f"vendor.raises:rms_norm {ON_CPU} cannot be imported: ModuleNotFoundError: No module",
}


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        pytest.param("vendor.fails:PLUGIN", (*QUICK, "doctor"), marks=pytest.mark.slow),
        ("vendor.platform:NO_CLASS", ("plan",)),
        ("vendor.overrides:ABSENT", ("train",)),
        ("vendor.overrides:NO_FUNCTION", ("validate-config",)),
        pytest.param("vendor.overrides:NARROW", QUICK, marks=RELEASE),
        # What only an import shows.
        pytest.param("vendor.overrides:BROKEN", ("doctor", "platform"), marks=pytest.mark.slow),
        pytest.param("vendor.fails:PLUGIN", ("platform",), marks=RELEASE),
        pytest.param("vendor.platform:NO_CLASS", ("doctor", "platform"), marks=RELEASE),
        pytest.param("vendor.overrides:NARROW", ("platform",), marks=pytest.mark.slow),
        pytest.param("vendor.overrides:NARROW", ("doctor",), marks=RELEASE),
    ],
)
def test_every_command_says_what_is_wrong(tmp_path, entry, names):
    for name in names:
        code, text = run_command(tmp_path, name, entry)
        assert CASES[entry] in text, (name, text)
        assert ("install its version for this megalaunch" if "NARROW" in entry else REPAIR) in text, (name, text)
        assert code == (0 if name == "doctor" else 2)


def test_the_app_itself_says_what_is_wrong(monkeypatch):
    """As tests and other programs call it: not only the console script ends without a traceback."""
    from typer.testing import CliRunner

    from megalaunch.cli.app import app

    def broken() -> None:
        raise PlatformError("the platform warp cannot be loaded", REPAIR)

    monkeypatch.setattr("megalaunch.platform.detect.detect_machine", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.stderr) == (2, f"error: the platform warp cannot be loaded\nfix:  {REPAIR}\n")


def test_a_class_that_is_no_platform_is_an_error_of_the_engine(tmp_path, monkeypatch):
    from megalaunch.engine.platform.registry import _load
    from megalaunch.platform.platforms import PlatformFacts

    install_package(tmp_path, FILES, {})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vendor"]:  # another test's package
        monkeypatch.delitem(sys.modules, name)
    for implementation, said in {
        "vendor.device:WarpPlatform": r"WarpPlatform is not a subclass of megalaunch\.engine\.platform\.platform\.Pl",
        "vendor.raises:WarpPlatform": "cannot be imported: ModuleNotFoundError: No module named 'warp_runtime'; repair",
    }.items():
        with pytest.raises(PlatformError, match=said):
            _load(PlatformFacts("warp", "wccl", implementation))


BROKEN_TORCH = (
    "vendor 1.0, which torch imports by itself, fails: ModuleNotFoundError: No module named 'warp_runtime'",
    f"install the vendor that was built for torch {torch.__version__}, or uninstall it",
)


@pytest.mark.parametrize("name", slow_but(["doctor", "run", "platform"], "platform"))
def test_a_package_that_breaks_the_import_of_torch_is_named(tmp_path, name):
    code, text = run_command(tmp_path, name, "vendor.fails:autoload")
    assert all(part in text for part in BROKEN_TORCH), text
    assert "reinstall" not in text
    assert code == (0 if name == "doctor" else 2)
    if name == "run":
        assert "megalaunch: torch cannot be imported (exit code 2)" in text
        assert "next repair or leave out that package" in text


def test_a_package_that_crashes_the_import_of_torch_is_suspected(tmp_path, monkeypatch):
    install_package(tmp_path, FILES, {"torch.backends": {"warp": "vendor.crash:autoload"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    crash = Package("torch", "train", "train", "import os; os.abort()")
    (state,) = inspect_packages([crash])
    assert state.cause.cause == "torch crashes when it is imported, and with it vendor 1.0"
    assert state.cause.fix.startswith("install the vendor that was built for torch ")


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            "ImportError: libwarp.so: no such file\n\nThe above exception was the direct cause of the following "
            "exception:\n\nTraceback (most recent call last):\nRuntimeError: Failed to load the backend extension: "
            "warp_x. You can disable extension auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0.\n",
            "warp_x, which torch imports by itself, fails: ImportError: libwarp.so: no such file; install the warp_x",
        ),
        ("RuntimeError: Failed to load the backend extension: x. You can disable it\nValueError: a later one\n", ""),
    ],
)
def test_the_agents_log_names_the_package(tmp_path, log, message):
    (tmp_path / "agent.log").write_text(log)
    failure = Failure(0, None, "", "starting", 0, "exit code 1", "")
    assert name_broken_backend(failure, tmp_path / "agent.log").message.startswith(message)
