"""`megalaunch doctor`: what it tells, what it finds missing or broken, and each fix."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalaunch.cli.doctor import build_report, report_text
from megalaunch.kernels import add_norm, forms, fused_norm, rope
from megalaunch.kernels.grouped_linear import grouped_linear
from megalaunch.platform import operators, selection
from megalaunch.platform import packages as packages_module
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine
from megalaunch.platform.operators import implementations
from megalaunch.platform.packages import OPTIONAL, PACKAGES, Package, PackageState, inspect_packages, minimum_version

TORCH = next(package for package in PACKAGES if package.name == "torch")
MEGALAUNCH = Path(sys.executable).with_name("megalaunch")


def machine(chip: str = "cpu", devices: int = 0, notes: tuple[str, ...] = ()) -> Machine:
    return Machine(CHIPS[chip], devices, 8, 64 * 2**30, notes)


def works(package: Package, version: str = "1.0", said: str = "") -> PackageState:
    return PackageState(package, version, None, said)


def test_the_command_here():
    done = subprocess.run([MEGALAUNCH, "doctor", "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert {row["name"] for row in report["optional"]} == {entry.name for entry in OPTIONAL if not entry.only_gpu}


@pytest.mark.parametrize("version", [None, "2026.10.11"])
def test_the_report_fits_on_a_screen(version):
    """A maintainer reads it in a bug report: 45 lines of 100 columns, whatever is installed."""
    states = [works(package, "2.13.0+cu130", "8") for package in PACKAGES]
    report = build_report(machine("h100", 8, ("a note.",)), states, dict.fromkeys(OPTIONAL, version))
    lines = report_text(report).splitlines()
    assert (len(lines) <= 45, max(map(len, lines)) <= 100) == (True, True)
    assert all(any(package.name in line for line in lines) for package in OPTIONAL)
    assert "megalaunch doctor --all" in lines[-2]


def test_optional_packages_that_are_not_installed_are_named():
    optional = {package: None if package.name in ("optuna", "nltk") else "1.0" for package in OPTIONAL}
    report = build_report(machine(), [works(TORCH)], optional)
    text = report_text(report, everything=True)
    assert re.search(r"^  optuna +not installed  sweep --sampler tpe", text, re.MULTILINE)
    assert "pip install 'megalaunch[sweep]'" in text
    assert "pip install nltk\n" in text
    for shown in (text, report_text(report)):
        assert (
            "nothing required for training is missing; optional and not installed: nltk, optuna" in shown.splitlines()
        )
    assert "\nnothing is missing\n" in report_text(
        build_report(machine(), [works(TORCH)], dict.fromkeys(OPTIONAL, "1"))
    )


def test_packages_for_gpus_are_named_where_there_is_one():
    text = report_text(build_report(machine(), [works(TORCH)], dict.fromkeys(OPTIONAL)), everything=True)
    assert re.search(
        r"deep_ep +not installed +parallel.moe_token_dispatcher_type=flex +pip install --no-build-iso", text
    )


def test_attention_backends_of_packages_are_told_from_those_of_the_machine():
    text = report_text(build_report(machine("h100", 8), [works(TORCH)]), everything=True)
    assert "auto | flash | cudnn | efficient | flex | math\n" in text
    assert re.search(
        r"^    auto +torch's operator; .*: by mask, dtype and length, never of another package$", text, re.M
    )
    assert re.search(r"^    flash_attn +not installed: pip install --no-build-isolation 'flash-attn>=2.6'$", text, re.M)
    assert re.search(r"^    te +not installed: pip install 'megalaunch\[te\]'$", text, re.M)


@pytest.mark.parametrize("extra", sorted({package.extra for package in OPTIONAL if package.extra}))
def test_the_extras_that_are_named_bring_the_packages(extra):
    required = importlib.metadata.requires("megalaunch")
    for package in OPTIONAL:
        if package.extra == extra:
            name = package.name.replace("_", "-")  # as metadata spells names, whatever pyproject.toml has
            assert any(row.startswith(name) and f"extra == '{extra}'" in row for row in required), package.name


@pytest.mark.parametrize("device", ["cpu", "cuda", "musa"])
def test_operators_and_what_computes_them(device):
    rows = list(implementations(device))
    assert rows[0].operator == "causal attention"
    for module in re.findall(r"megalaunch\.[\w.]+", " ".join(row.implementation for row in rows)):
        assert importlib.util.find_spec(module.rstrip(".")), module
    assert "operators and their implementations here\n  causal attention " in report_text(
        build_report(machine(), [works(TORCH)]), everything=True
    )


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda", "musa"])
def test_the_permutation_of_tokens_is_the_one_that_runs(device, installed, monkeypatch):
    monkeypatch.setattr(operators, "find_spec", lambda name: "found" if installed else None)
    monkeypatch.setattr(forms, "_has_triton", lambda: installed)
    said = {row.operator: row.implementation for row in implementations(device)}["permutation of tokens by expert"]
    on_device = SimpleNamespace(is_cuda=device == "cuda")
    in_triton = forms.uses_triton(on_device)
    assert in_triton == (device == "cuda" and installed)
    assert said == ("megalaunch.kernels.permute_triton" if in_triton else "megalaunch.kernels.permute, in torch")


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda", "musa"])
def test_the_kernels_of_norms_and_rotations_are_those_that_run(device, installed, monkeypatch):
    monkeypatch.setattr(operators, "find_spec", lambda name: "found" if installed else None)
    monkeypatch.setattr(forms, "_has_triton", lambda: installed)
    said = " ".join(row.implementation for row in implementations(device))
    on_device = SimpleNamespace(is_cuda=device == "cuda", shape=(1, 8), device=SimpleNamespace(type=device))
    assert (f"{rope.__name__}_triton" in said) == rope.fuses_rope(on_device)
    assert (f"{add_norm.__name__}_triton" in said) == add_norm.fuses_add_norm(on_device, torch.empty(8))
    assert (f"{add_norm.__name__}_triton" in said) == fused_norm.uses_norm_kernel(on_device)


@pytest.mark.parametrize(("width", "calls"), [(8, 1), (7, 0)])  # 7 numbers of 4 bytes are no multiple of 16
def test_the_matmuls_of_experts_are_those_that_run(width, calls, monkeypatch):
    said = {row.operator: row.implementation for row in implementations("cpu")}["matmuls of experts"]
    assert said == "megalaunch.kernels.grouped_linear: torch's grouped_mm, or a loop over experts"
    seen, grouped_mm = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *args, **kwargs: seen.append(1) or grouped_mm(*args, **kwargs)
    )
    grouped_linear(torch.ones(4, width), torch.ones(2, 8, width), torch.tensor([1, 4], dtype=torch.int32))
    assert len(seen) == calls


def test_a_machine_with_gpus():
    states = [works(TORCH, "2.13.0", "8")]
    text = report_text(build_report(machine("h100", 8, ("a note.",)), states))
    assert "  chip    8 x h100, 79.6 GiB each, 989 TFLOP/s in bf16\n" in text
    assert "  memory  64.0 GiB\n" in text
    assert "  note    a note.\n" in text
    assert "4 x t4, 15.0 GiB each, 65 TFLOP/s in fp16\n" in report_text(build_report(machine("t4", 4), states))
    assert "nothing is missing" in text


def test_an_unknown_gpu_claims_no_peak():
    assert "  chip    1 x cuda\n" in report_text(build_report(machine("cuda", 1), [works(TORCH, "2.13.0", "1")]))


@pytest.mark.parametrize(
    ("version", "said", "fix"),
    [("2.13.0+cpu", "0", "install torch's CUDA build"), ("2.13.0", "6", "compare the driver's CUDA version")],
)
def test_gpus_that_torch_does_not_see(version, said, fix):
    problems = build_report(machine("h200", 8), [works(TORCH, version, said)])["problems"]
    assert len(problems) == 1
    assert problems[0]["problem"] == f"torch {version} sees {said} of 8 h200"
    assert problems[0]["fix"].startswith(fix)


@pytest.mark.parametrize("seen", [6, None])
def test_devices_that_torch_does_not_see_with_their_package(monkeypatch, seen):
    monkeypatch.setattr(selection, "count_devices_of_torch", lambda package, device: seen)
    (problem,) = build_report(machine("mtt_s5000", 8), [works(TORCH, "2.13.0", "0")])["problems"]
    assert problem["problem"] == f"torch 2.13.0 with torch_musa sees {seen or 'no'} of 8 mtt_s5000"
    assert problem["fix"] == "install the torch_musa that was built for torch 2.13.0 and the driver"


def test_what_is_missing_names_what_for_and_the_extra():
    report = build_report(machine(), [PackageState(TORCH, None, "is not installed", "")])
    assert report["problems"] == [
        {
            "problem": "torch is not installed",
            "needed_for": "train, generate",
            "fix": "pip install 'megalaunch[train]'",
        }
    ]
    assert "missing\n  torch is not installed (for: train, generate)\n    fix: pip install" in report_text(report)


def test_states_of_packages(monkeypatch):
    monkeypatch.setattr(packages_module, "IMPORT_TIMEOUT", 1.0)
    monkeypatch.setattr(packages_module, "minimum_version", {"typer": "99.1"}.get)
    states = inspect_packages(
        [
            Package("no-such-distribution", "train", "x", "pass"),
            Package("pyyaml", None, "x", "print(3)"),
            Package("rich", None, "x", "raise ImportError('undefined symbol: abc')"),
            Package("omegaconf", None, "x", "import os; os._exit(7)"),
            Package("numpy", None, "x", "import time; time.sleep(60)"),
            Package("typer", None, "x", "pass"),
        ]
    )
    assert [state.problem for state in states[:5]] == [
        "is not installed",
        None,
        "cannot be imported: ImportError: undefined symbol: abc",
        "cannot be imported: exit 7",
        "could not be imported in 1 s",
    ]
    assert states[1].output == "3"
    assert states[5].problem == "is older than 99.1"


def test_a_broken_package_is_to_be_installed_anew():
    broken = PackageState(TORCH, "2.13.0", "cannot be imported: x", "")
    fix = build_report(machine(), [broken])["problems"][0]["fix"]
    assert fix == "pip install --upgrade --force-reinstall torch 'megalaunch[train]'"


def test_least_versions_come_from_our_own_metadata():
    assert minimum_version("torch") == "2.11"
    assert minimum_version("hydra-core") == "1.3.2"
    assert minimum_version("tor") is None
