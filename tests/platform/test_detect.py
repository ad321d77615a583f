"""Detection on made-up machines: device nodes, the driver's tool, visible devices, control-group limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megalaunch.platform import accelerators
from megalaunch.platform.cgroups import usable_cores, usable_memory
from megalaunch.platform.detect import cpu_bf16_unit, detect_machine

H100 = "NVIDIA H100 80GB HBM3, GPU-{n}aaa, 81559, 9.0"


class FakeMachine:
    """A file system root and an environment to detect on."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.tools = folder / "bin"
        self.root.mkdir()
        self.tools.mkdir()
        self.environ = {"PATH": str(self.tools)}

    def write(self, path: str, text: str = "") -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def gpus(self, *lines: str, script: str | None = None) -> None:
        for number in range(max(1, len(lines))):
            self.write(f"dev/nvidia{number}")
        self.write("dev/nvidiactl")
        answer = "\n".join(lines)
        tool = self.tools / "nvidia-smi"
        tool.write_text(script or f"#!/bin/sh\n/bin/cat <<'END'\n{answer}\nEND\n")
        tool.chmod(0o755)

    def detect(self):
        return detect_machine(self.root, self.environ)


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path)


def test_a_machine_without_anything_is_a_cpu(machine):
    found = machine.detect()
    assert (found.chip.name, found.devices, found.notes) == ("cpu", 0, ())
    assert found.chip.native_bf16 is None
    assert found.cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("flags", "unit"), [("sse avx512_bf16 amx_bf16", "AMX"), ("avx512_bf16 amx_tile", None), ("", None)]
)
def test_the_unit_that_multiplies_bf16(machine, flags, unit):
    machine.write("proc/cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\n")
    assert cpu_bf16_unit(machine.root) == unit
    assert machine.detect().chip.native_bf16 == unit


def test_eight_h100(machine):
    machine.gpus(*(H100.format(n=n) for n in range(8)))
    found = machine.detect()
    assert (found.chip.name, found.devices, found.notes) == ("h100", 8, ())


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "cuda"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "cuda"),
        ("NVIDIA H800", "cuda"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "cuda"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10-4Q", "cuda"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000_ada"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "cuda"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", "cuda"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "cuda"),
        ("Tesla T4", "t4"),
        ("NVIDIA T4", "t4"),
        ("NVIDIA T400 4GB", "cuda"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100_32gb"),
        ("Tesla V100-SXM3-32GB", "v100_32gb"),
        ("Tesla V100-PCIE-16GB", "v100_pcie"),
        ("Tesla V100-PCIE-32GB", "v100_pcie_32gb"),
        ("Tesla V100S-PCIE-32GB", "cuda"),
    ],
)
def test_names_of_the_driver(machine, name, chip):
    machine.gpus(f"{name}, GPU-1, 1000, 9.0")
    assert machine.detect().chip.name == chip


def test_a_gpu_without_facts_keeps_its_memory_and_says_so(machine):
    machine.gpus("Quadro RTX 8000, GPU-1, 49152, 7.5")
    found = machine.detect()
    assert found.chip.memory_bytes == 49152 * 2**20
    assert (found.chip.native_bf16, found.chip.capability) == (None, 7.5)
    assert found.notes == ("No specification of Quadro RTX 8000: MFU is unknown.",)
    machine.gpus("NVIDIA RTX 6000 Ada Generation, GPU-1, 49140, 8.9")
    assert machine.detect().chip.native_bf16 == "tensor cores"


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        ("0,1", 2),
        ("3", 1),
        (" 1 , 0", 2),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,-1,2", 1),
        ("0,9,1", 1),
        ("GPU-2", 1),
        ("GPU-", 0),
    ],
)
def test_visible_devices_as_cuda_reads_them(machine, variable, devices):
    machine.gpus(*(H100.format(n=n) for n in range(4)))
    machine.environ["CUDA_VISIBLE_DEVICES"] = variable
    found = machine.detect()
    assert found.devices == devices
    assert found.chip.name == ("h100" if devices else "cpu")
    assert f"CUDA_VISIBLE_DEVICES leaves {devices} of 4 GPUs." in found.notes


def test_different_gpus_are_said(machine):
    machine.gpus("NVIDIA B200, GPU-1, 183359, 10.0", H100.format(n=2))
    assert machine.detect().notes == (
        "Different GPUs (NVIDIA B200, NVIDIA H100 80GB HBM3): plans use the first, NVIDIA B200.",
    )


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n", "nvidia-smi failed (exit 18): Driver/library"),
        ("#!/bin/sh\nexit 9\n", "nvidia-smi failed (exit 9): no message"),
        ("#!/bin/sh\nexit 0\n", "nvidia-smi lists no GPU."),
        ("#!/bin/sh\nexec /bin/sleep 30\n", "nvidia-smi did not answer in 0.2 s."),
        ("#!/no/such/shell\n", "nvidia-smi could not be started"),
    ],
)
def test_a_broken_tool_leaves_what_the_driver_files_say(machine, monkeypatch, script, note):
    monkeypatch.setattr(accelerators, "TOOL_TIMEOUT", 0.2)
    machine.gpus(script=script)
    information = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 0\nGPU UUID: \t GPU-7\n"
    machine.write("proc/driver/nvidia/gpus/0000:01:00.0/information", information)
    found = machine.detect()
    assert (found.chip.name, found.devices) == ("h100", 1)
    assert len(found.notes) == 1
    assert found.notes[0].startswith(note)


def test_nodes_without_any_tool_count_as_gpus(machine):
    machine.write("dev/nvidia0")
    machine.write("dev/nvidia1")
    found = machine.detect()
    assert (found.chip.name, found.devices) == ("cuda", 2)
    assert found.notes[0] == "NVIDIA device nodes are present, but nvidia-smi is not on PATH."


def test_other_vendors_are_named_not_used(machine):
    machine.write("dev/kfd")
    machine.write("dev/mtgpu.0")
    found = machine.detect()
    assert found.chip.name == "cpu"
    assert "platform.chip=mi300x" in found.notes[0]
    assert "Moore Threads" in found.notes[1]


def test_control_groups_limit_cores_and_memory(machine):
    cores = len(os.sched_getaffinity(0))
    machine.write("proc/meminfo", "MemTotal:       1024 kB\nMemFree: 1 kB\n")
    assert usable_memory(machine.root) == 2**20
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("sys/fs/cgroup/a/b/memory.max", "max\n")
    machine.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert (usable_cores(machine.root), usable_memory(machine.root)) == (cores, 2**20)
    machine.write("sys/fs/cgroup/a/memory.max", "5000\n")  # a parent's limit holds too
    machine.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    assert (usable_cores(machine.root), usable_memory(machine.root)) == (1, 5000)


def test_control_groups_of_the_first_version_in_a_container(machine):
    machine.write("proc/meminfo", "MemTotal:       1024 kB\n")
    machine.write("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n")  # the mount's top is this group
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert (usable_cores(machine.root), usable_memory(machine.root)) == (1, 7000)
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert usable_cores(machine.root) == len(os.sched_getaffinity(0))


def test_this_machine():
    found = detect_machine()
    assert found.cores >= 1
    assert found.memory_bytes > 2**28
