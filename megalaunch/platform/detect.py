"""What this machine has, found without torch: accelerators, cores, memory, bf16 unit.

Device nodes say that there are accelerators, the driver's tool which, the processor's flags what it multiplies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalaunch.platform.accelerators import find_accelerators
from megalaunch.platform.cgroups import free_disk, usable_cores, usable_memory
from megalaunch.platform.chips import CHIPS, ChipFacts


@dataclass(frozen=True)
class Machine:
    """`chip` is the kind of device a run would use here, `devices` how many accelerators it may use (0: CPU only).

    `cores` and `memory_bytes` are the host's, within this process's limits. `notes` are sentences for the user.
    `free_disk` tells the bytes that may still be written on a path's disk.
    """

    chip: ChipFacts
    devices: int
    cores: int
    memory_bytes: int
    notes: tuple[str, ...]
    free_disk: Callable[[Path], int | None] = free_disk


def detect_machine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Machine:
    """Look at this machine. Never raises for what it finds: what cannot be read becomes a note.

    `root` (the file system's root) and `environ` (None: this process's) are there for tests.
    """
    environ = os.environ if environ is None else environ
    found = find_accelerators(root, environ)
    chip = found.chip or replace(CHIPS["cpu"], native_bf16=cpu_bf16_unit(root))
    return Machine(chip, found.devices, usable_cores(root), usable_memory(root), found.notes)


def cpu_bf16_unit(root: Path = Path("/")) -> str | None:
    """The processor's unit that multiplies bf16 faster than fp32: "AMX", or None."""
    return "AMX" if "amx_bf16" in _cpu_flags(root) else None


def _cpu_flags(root: Path) -> frozenset[str]:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
