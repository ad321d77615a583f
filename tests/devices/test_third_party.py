"""A package of another vendor brings a device, its platform, a chip and overrides, and trains with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed_package import install_package
from txda_device import build_txda
from warm_process import COLD_MEGALAUNCH

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

PLUGIN = """
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.overrides import Override, OverridePackage
from megalaunch.platform.platforms import PlatformFacts
from megalaunch.platform.plugins import PlatformPlugin

PLUGIN = PlatformPlugin(
    PlatformFacts("warp", "wccl", "vendor.device:WarpPlatform", "WARP_VISIBLE_DEVICES", "torch_warp", priority=600),
    (ChipFacts("warp9", "warp", 64 * 2**30, {"bf16": 500e12}, "wccl", "WARP_VISIBLE_DEVICES", "matrix unit"),),
)
OVERRIDES = (
    Override("kernels.swiglu.swiglu", "vendor.activations:swiglu", "warp"),
    OverridePackage("vendor.mirror", "warp", priority=1),
)
"""
FILES = {
    "vendor/plugin.py": PLUGIN,
    "vendor/device.py": """
from megalaunch.engine.platform.platform import Platform

class WarpPlatform(Platform):
    pass
""",
    "vendor/activations.py": """
def swiglu(gate, up, *, overwrite_up=False):
    return gate * gate.sigmoid() * up
""",
    "vendor/mirror/engine/model/layers.py": """
from megalaunch.engine.model import layers
from megalaunch.engine.param_layout import local_param

class Norm(layers.Norm):
    def normalize(self, x):
        if self.config.layer or self.config.zero_centered_gamma:
            return super().normalize(x)
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.config.epsilon).rsqrt()
        return (wide * scale).to(x.dtype) * local_param(self.weight)
""",
}
OVERRIDDEN = {
    "kernels.swiglu.swiglu": "vendor.activations:swiglu",
    "engine.model.layers.Norm": "vendor.mirror.engine.model.layers:Norm",
}
SMALL = ("recipe=tiny", "train.steps=2", "precision=fp32", "data.mock=true")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Install the vendor's packages: torch_warp, which is the built test device by another name, and vendor."""
    site = tmp_path_factory.mktemp("site")
    install_package(
        site,
        FILES,
        {
            "megalaunch.platforms": {"warp": "vendor.plugin:PLUGIN"},
            "megalaunch.overrides": {"warp": "vendor.plugin:OVERRIDES"},
        },
    )
    (site / "torch_warp").mkdir()
    for path in (build_txda() / "torch_txda").iterdir():
        if path.suffix == ".so":
            (site / "torch_warp" / path.name).symlink_to(path)
        elif path.suffix == ".py":
            text = path.read_text().replace("txda", "warp").replace("tccl", "wccl")
            (site / "torch_warp" / path.name).write_text(text)
    return site


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def run(site: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*COLD_MEGALAUNCH, *arguments],
        cwd=folder,
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


CALLS = """
import json, sys
from typer.testing import CliRunner
from megalaunch.cli.app import app
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    print(json.dumps([done.exit_code, done.stdout]))
"""


def run_each(site: Path, folder: Path, *commands: list[str]) -> list[str]:
    """Return what each of the commands prints, all in one other process that has the vendor's packages."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(commands)],
        cwd=folder,
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in answers] == [0] * len(commands), answers
    return [said for _, said in answers]


@pytest.fixture(scope="module")
def said(site, tmp_path_factory) -> list[str]:
    """What the planner says of the platform and of the chip, then the checker, the operators' check and the doctor.

    One process says all of it: each start imports torch and the device, which takes seconds of a core.
    """
    plans = [["plan", "recipe=llama3_8b", f"platform={option}"] for option in ("warp", "warp9")]
    checks = [["validate-config", *SMALL, "platform=warp", "--json"], ["platform", "check"], ["doctor", "--all"]]
    return run_each(site, tmp_path_factory.mktemp("said"), *plans, *checks)


@pytest.mark.slow
def test_the_planner_and_the_checker_know_it(said):
    *planned, checked, _, _ = said
    for plan in planned:
        assert "x 8 warp9" in plan or "x 1 warp9" in plan
        assert "overrides  kernels.swiglu.swiglu by vendor.activations:swiglu (vendor 1.0); engine.model" in plan
    found = json.loads(checked)
    notes = {row["message"] for row in found["findings"] if row["rule"] == "platform.overrides"}
    assert notes == {f"{target} is replaced by {by} (vendor 1.0)" for target, by in OVERRIDDEN.items()}


@pytest.mark.slow
@pytest.mark.release  # test_layouts.py trains on a device; tests/platform/test_overrides.py replaces operators
def test_it_trains_as_a_cpu_does(site, tmp_path):
    run(
        site,
        tmp_path,
        "train",
        *SMALL,
        "platform=warp",
        "parallel=tp2",
        "cluster.devices_per_node=2",
        "run.directory=device",
    )
    run(site, tmp_path, "train", *SMALL, "platform=cpu", "parallel=dp1", "run.directory=cpu")
    ours, theirs = (list(read_lines(RunDirectory(tmp_path / name).metrics)) for name in ("device", "cpu"))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key in {"loss", "grad_norm", "validation_loss"} & other.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-5), (mine["step"], key)
    events = [line for line in read_lines(RunDirectory(tmp_path / "device").events) if line["event"] == "override"]
    assert {line["operator"]: line["implementation"] for line in events} == OVERRIDDEN
    assert {line["vendor"] for line in events} == {"vendor 1.0"}


@pytest.mark.slow
def test_its_operators_are_checked_and_its_devices_reported(said):
    *_, operators, report = said
    assert operators.endswith("all are right\n")
    assert "x warp9" in report
    assert "engine.model.layers.Norm, overridden" in report
