"""scripts/bench gpu on a machine without network: its Python lacks Hydra and Liger, which a carried folder holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import gpu_wheels

CARRIED = [name for name in gpu_wheels.PACKAGES if not name.startswith("liger")]
INSTALLED = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "tokenizers",
    "rich",
    "shellingham",
    "annotated-doc",
    "pyyaml",
    "safetensors",
)


def link(names, folder):
    """Link the packages of this environment into a folder, with what they need and without what is carried."""
    left, done = list(names), set()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in done:
            continue
        done.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform or an extra
        for entry in {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / entry).exists():
                (folder / entry).symlink_to(found.locate_file(entry))
        if names is INSTALLED:
            needs = [need for need in found.requires or () if "extra ==" not in need]
            left += [re.match(r"[\w.-]+", need)[0] for need in needs]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a machine, which has torch and lacks what is carried."""
    venv = tmp_path_factory.mktemp("machine") / "venv"
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    link(INSTALLED, next((venv / "lib").glob("python3*")) / "site-packages")
    return venv / "bin" / "python"


@pytest.fixture
def machine(tmp_path, python):
    """The checkout and environment of a machine without another Python that has torch."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("scripts", "megalaunch"):
        (checkout / name).symlink_to(ROOT / name)
    keep = {name: os.environ[name] for name in ("HOME", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
    path = f"{Path(sys._base_executable).parent}:/usr/bin:/bin"
    return checkout, {**keep, "PATH": path, "MEGALAUNCH_PYTHON": str(python)}


def bench(machine, *arguments):
    checkout, environment = machine
    command = [str(checkout / "scripts" / "bench"), "gpu", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_without_the_carried_packages_the_cause_and_the_fix_are_said(machine, tmp_path):
    done = bench(machine, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "has torch and lacks Hydra; run scripts/bench gpu_wheels on a machine with a network" in done.stderr
    assert not (tmp_path / "out").exists()
    done = bench(machine, "--out", tmp_path / "out", "--wheels", tmp_path / "none")
    assert (done.returncode, "none is no folder" in done.stderr) == (2, True)


@pytest.mark.parametrize("named", [False, True])
def test_the_carried_packages_are_found(machine, tmp_path, named):
    folder = tmp_path / "carried" if named else machine[0] / "build" / "gpu_wheels"
    folder.mkdir(parents=True)
    link(CARRIED, folder)
    done = bench(machine, "--help", *(["--wheels", folder] if named else []))
    assert done.returncode == 0, done.stderr
    assert "measure a GPU in one command" in done.stdout


@pytest.mark.slow
def test_the_bench_measures_with_the_carried_packages(machine, tmp_path):
    folder = machine[0] / "build" / "gpu_wheels"
    folder.mkdir(parents=True)
    link(CARRIED, folder)
    chosen = ("kernels: SwiGLU", "transformers: GPT-2", "checks")
    done = bench(machine, "--out", tmp_path / "out", "--device", "cpu", "--small", "--only", *chosen)
    log = tmp_path / "out" / "log.txt"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.is_file() else "")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert {row["kind"] for row in rows} == {"kernels", "transformers", "checks"}
    assert not [row for row in rows if row.keys() & {"failed", "left_out"}]
    assert next(row for row in rows if row["case"] == "gpu tests")["collected"] > 200


def pip(monkeypatch, pure):
    """Put a pip in place that unpacks one wheel."""

    def run(command, check):
        folder = Path(command[command.index("--target") + 1])
        info = folder / "hydra_core-1.3.8.dist-info"
        info.mkdir(parents=True)
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_wheels.subprocess, "run", run)


def test_a_folder_is_filled_again_and_no_other_is_replaced(tmp_path, monkeypatch, capsys):
    pip(monkeypatch, pure=True)
    folder = tmp_path / "carried"
    assert gpu_wheels.main(["--out", str(folder)]) == 0
    (folder / "old").touch()
    assert gpu_wheels.main(["--out", str(folder)]) == 0
    assert not (folder / "old").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    assert gpu_wheels.main(["--out", str(tmp_path / "other")]) == 1
    assert (tmp_path / "other" / "mine").exists()
    assert "holds other files" in capsys.readouterr().err


def test_a_compiled_package_is_refused(tmp_path, monkeypatch, capsys):
    pip(monkeypatch, pure=False)
    assert gpu_wheels.main(["--out", str(tmp_path / "carried")]) == 1
    assert "not pure Python, and bound to this machine: hydra_core-1.3.8" in capsys.readouterr().err
