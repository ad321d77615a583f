"""Find the accelerators available to this process, without torch.

Reads device nodes first (cheap), then the driver's tool, then /proc; the visible-devices variable filters the result.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS

TOOL_TIMEOUT = 5.0  # seconds; the tool is slow when no process keeps the driver loaded

# Matched in order against the driver's device name. A name without a match is an NVIDIA GPU of unknown specification.
_NVIDIA_NAMES = (
    (r"A100 80GB PCIe|A100-PCIE-80GB", "a100_pcie_80gb"),
    (r"A100-PCIE-40GB", "a100_pcie_40gb"),
    (r"A100.*80GB", "a100_80gb"),
    (r"A100.*40GB", "a100_40gb"),
    (r"H100 PCIe", "h100_pcie"),
    (r"H100 NVL", "h100_nvl"),
    (r"H100 80GB HBM3", "h100"),
    (r"\bH200(?! NVL)", "h200"),
    (r"GB200", "gb200"),
    (r"\bB200", "b200"),
    (r"\bL40S$", "l40s"),  # no vGPU, such as L40S-8Q
    (r"\bL4$", "l4"),
    (r"\bA10$", "a10"),
    (r"\bA10G$", "a10g"),
    (r"RTX A6000$", "rtxa6000"),
    (r"RTX 6000 Ada Generation$", "rtx6000_ada"),
    (r"GeForce RTX 3090$", "rtx3090"),
    (r"GeForce RTX 4090$", "rtx4090"),
    (r"\bT4$", "t4"),
    (r"V100-SXM\d-16GB", "v100"),
    (r"V100-SXM\d-32GB", "v100_32gb"),
    (r"V100-PCIE-16GB", "v100_pcie"),
    (r"V100-PCIE-32GB", "v100_pcie_32gb"),
)

# Device nodes of accelerators that are not detected further, each with a note for the user.
_OTHER_NODES = (
    (r"kfd", "an AMD GPU driver is loaded; name the chip to use it (platform.chip=mi300x)"),
    (
        r"mthreads\d+|mtgpu\.\d+",
        "Moore Threads GPUs are present, but their model is not detected (platform/chips.py)",
    ),
)


@dataclass(frozen=True)
class Accelerators:
    """The accelerators found; `chip` None means that a run uses the CPU."""

    chip: ChipFacts | None
    devices: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Gpu:
    """One GPU as reported by its driver. `capability` is the CUDA compute capability (9.0), None if unknown."""

    name: str
    uuid: str
    memory_bytes: int | None
    capability: float | None


def find_accelerators(root: Path, environ: Mapping[str, str]) -> Accelerators:
    """Find the accelerators of this process; `notes` say which could not be used and why.

    `root` is the root of the file system, `environ` the environment.
    """
    nodes = _node_names(root / "dev")
    notes = [f"{note}." for pattern, note in _OTHER_NODES if any(re.fullmatch(pattern, node) for node in nodes)]
    count = sum(1 for node in nodes if re.fullmatch(r"nvidia\d+", node))
    if count == 0 and "dxg" not in nodes:  # dxg: the device node of GPUs in WSL
        return Accelerators(None, 0, tuple(notes))
    gpus, problem = _query_driver(environ)
    if problem:
        notes.append(problem)
        gpus = _read_proc(root) or [_Gpu("", "", None, None)] * count
    usable = [gpus[index] for index in visible_devices([gpu.uuid for gpu in gpus], environ)]
    if len(usable) < len(gpus):
        notes.append(f"CUDA_VISIBLE_DEVICES leaves {len(usable)} of {len(gpus)} GPUs.")
    if not usable:
        return Accelerators(None, 0, tuple(notes))
    kinds = sorted({gpu.name for gpu in usable})
    if len(kinds) > 1:
        notes.append(f"Different GPUs ({', '.join(kinds)}): plans use the first, {usable[0].name}.")
    chip = _chip_name(usable[0])
    if not chip.peak_flops:
        notes.append(f"No specification of {usable[0].name or 'this GPU'}: MFU is unknown.")
    return Accelerators(chip, len(usable), tuple(notes))


def _node_names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _query_driver(environ: Mapping[str, str]) -> tuple[list[_Gpu], str | None]:
    """Return the GPUs that nvidia-smi lists, and a sentence with the reason of a failure (None: it succeeded)."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return [], "NVIDIA device nodes are present, but nvidia-smi is not on PATH."
    query = [tool, "--query-gpu=name,uuid,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TOOL_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer in {TOOL_TIMEOUT:g} s."
    except OSError as error:
        return [], f"nvidia-smi could not be started: {error}."
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi failed (exit {done.returncode}): {lines[0] if lines else 'no message'}"
    gpus = [_parse_gpu(line) for line in done.stdout.splitlines() if line.strip()]
    return gpus, None if gpus else "nvidia-smi lists no GPU."


def _parse_gpu(line: str) -> _Gpu:
    name, uuid, memory, capability, *_ = [part.strip() for part in line.split(",")] + [""] * 3
    memory_bytes = int(memory) * 2**20 if memory.isdigit() else None
    return _Gpu(name, uuid, memory_bytes, float(capability) if re.fullmatch(r"\d+\.\d+", capability) else None)


def _read_proc(root: Path) -> list[_Gpu]:
    """Return the GPUs of the driver's /proc files, which give names but no memory sizes."""
    gpus = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        facts = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE))
        gpus.append(_Gpu(facts.get("Model", ""), facts.get("GPU UUID", ""), None, None))
    return gpus


def visible_devices(uuids: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: entries after the first invalid one are ignored.

    Args:
        uuids: of all GPUs, in the driver's order.
        environ: environment.

    Returns:
        The indices of the visible GPUs, in the order in which the process numbers them.
    """
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return list(range(len(uuids)))
    seen: list[int] = []
    for entry in map(str.strip, variable.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            seen.append(int(entry))
            continue
        named = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(named) != 1:
            break
        seen.append(named[0])
    return seen


def _chip_name(gpu: _Gpu) -> ChipFacts:
    """Return the chip that a GPU's name matches, else an unknown one with its memory and bf16 support."""
    for pattern, name in _NVIDIA_NAMES:
        if re.search(pattern, gpu.name):
            return CHIPS[name]
    # Ampere (8.0) is the first generation with bf16 tensor cores.
    unit = "tensor cores" if gpu.capability is not None and gpu.capability >= 8.0 else None
    return replace(CHIPS["cuda"], memory_bytes=gpu.memory_bytes, native_bf16=unit, capability=gpu.capability)
