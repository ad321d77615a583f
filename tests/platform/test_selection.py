"""Selection: what the environment asks for, what the machine has, and what is missing."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from made_specs import LAPTOP, composed, resolved

from megalaunch.plan.resolve import machine_mismatch, resolve
from megalaunch.platform import selection
from megalaunch.platform.detect import detect_machine
from megalaunch.platform.plugins import all_platforms
from megalaunch.runs.missing_devices import refusal_text


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these device nodes, and packages of vendors."""

    def make(nodes: tuple[str, ...], packages: tuple[str, ...] = (), **environ: str):
        (tmp_path / "dev").mkdir(exist_ok=True)
        for node in nodes:
            (tmp_path / "dev" / node).touch()
        installed = {name: ModuleSpec(name, None) for name in packages}
        monkeypatch.setattr(selection, "find_spec", installed.get)
        return detect_machine(tmp_path, {"PATH": "", **environ})

    return make


def test_the_order_of_preference():
    assert list(all_platforms()) == ["cuda", "musa", "txda", "npu", "cpu"]


@pytest.mark.parametrize(
    ("nodes", "packages", "environ", "chip", "devices"),
    [
        (("davinci0", "davinci1", "davinci_manager"), ("torch_npu",), {}, "npu", 2),
        (("davinci0",), (), {}, "cpu", 0),
        (("davinci0", "mthreads0"), ("torch_npu", "torch_musa"), {}, "musa", 1),
        (("davinci0", "mthreads0", "nvidia0"), ("torch_npu", "torch_musa"), {}, "cuda", 1),
        (("davinci0", "mthreads0"), ("torch_npu", "torch_musa"), {"MG_PLATFORM": "npu"}, "npu", 1),
        (("davinci0", "mthreads0"), ("torch_npu", "torch_musa"), {"MG_FL_PREFER": "NPU"}, "npu", 1),
        (("davinci0",), ("torch_npu",), {"MG_PLATFORM": "cpu", "MG_FL_PREFER": "npu"}, "cpu", 0),
        (("davinci0", "davinci1"), ("torch_npu",), {"ASCEND_RT_VISIBLE_DEVICES": "1"}, "npu", 1),
    ],
)
def test_the_preferred_platform_of_a_machine(machine, nodes, packages, environ, chip, devices):
    found = machine(nodes, packages, **environ)
    assert (found.chip.name, found.devices, found.problem) == (chip, devices, None)


@pytest.mark.parametrize(
    ("name", "packages", "problem"),
    [
        ("warp", (), "MG_PLATFORM=warp names no platform; known are cuda, musa, txda, npu, cpu"),
        (
            "txda",
            (),
            "MG_PLATFORM=txda: the package torch_txda, which adds the device txda to torch, is not installed",
        ),
        (
            "musa",
            ("torch_musa",),
            r"MG_PLATFORM=musa: this machine shows no musa device: nothing in /dev matches mthreads\d+|mtgpu\.\d+, or "
            "MUSA_VISIBLE_DEVICES hides all",
        ),
        (
            "cuda",
            (),
            r"MG_PLATFORM=cuda: this machine shows no cuda device: nothing in /dev matches nvidia\d+, or "
            "CUDA_VISIBLE_DEVICES hides all",
        ),
    ],
)
def test_a_choice_that_cannot_be_used_is_an_error_before_the_start(machine, name, packages, problem):
    found = machine((), packages, MG_PLATFORM=name)
    assert found.problem == problem
    spec, _ = resolved("recipe=tiny", machine=found)
    (finding,) = machine_mismatch(spec, found)
    assert (finding.severity, finding.path) == ("error", "platform.chip")
    assert finding.message == f"{problem}; select a platform that this machine has (platform=cpu)"


def test_an_option_stands_above_a_variable_that_cannot_be_followed(machine):
    found = machine((), (), MG_PLATFORM="txda")
    for option, message in (("platform=cpu", None), ("platform=auto", "platform=auto takes cpu instead")):
        resolution = resolve(composed("recipe=tiny", option).spec, found, "tiny")
        assert (machine_mismatch(resolution.spec, found, message is not None) == []) == (message is None)
        shown = [note for note in resolution.notes if note.rule == "platform.this_machine"]
        assert [(note.severity, note.message) for note in shown] == (
            [("warning", f"{found.problem}; {message}")] if message else []
        )


def test_a_chip_of_another_machine_names_the_missing_package(machine):
    spec, _ = resolved("recipe=tiny", "platform=mtt_s5000")
    (finding,) = machine_mismatch(spec, LAPTOP)
    assert finding.message == (
        "the run is for mtt_s5000, but this machine has no accelerator (cpu), and the package torch_musa, which adds "
        "the device musa to torch, is not installed"
    )
    composition, here = composed("recipe=tiny", "platform=mtt_s5000"), machine((), ("torch_musa",))
    text = refusal_text(machine_mismatch(spec, here), composition, spec, here)
    assert "  missing: this machine shows no musa device: nothing in /dev matches mthreads" in text
    nodes = tuple(f"mthreads{index}" for index in range(8))
    assert machine_mismatch(spec, machine(nodes, ("torch_musa",))) == []  # no tool names the model


@pytest.mark.slow
def test_a_device_without_nodes_is_counted_by_torch(machine, monkeypatch, tmp_path):
    package = Path(tmp_path / "torch_txda.py")
    package.write_text(
        "import torch, types, sys\ntorch.get_device_module = lambda name: types.SimpleNamespace(device_count=lambda: 3)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    selection.count_devices_of_torch.cache_clear()
    found = machine((), ("torch_txda",))
    selection.count_devices_of_torch.cache_clear()
    assert (found.chip.name, found.devices) == ("txda", 3)
