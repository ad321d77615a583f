"""Detect this machine without torch: accelerators, cores, memory, bf16 unit.

Device nodes show whether there are accelerators, the driver's tool identifies them, and the CPU flags give its units.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalaunch.platform.accelerators import find_accelerators
from megalaunch.platform.allocation import Allocation, find_allocation
from megalaunch.platform.cgroups import free_disk, usable_cores, usable_memory
from megalaunch.platform.chips import CHIPS, ChipFacts


@dataclass(frozen=True)
class Machine:
    """A detected machine.

    Attributes:
        chip: the kind of device that a run would use.
        devices: number of usable accelerators; 0: CPU only.
        cores: usable CPU cores of the host, within this process's limits.
        memory_bytes: usable memory of the host, within this process's limits.
        notes: sentences for the user.
        free_disk: returns the free bytes on the disk of a path.
        allocation: the nodes that a scheduler gave to this process; None: no scheduler.
    """

    chip: ChipFacts
    devices: int
    cores: int
    memory_bytes: int
    notes: tuple[str, ...]
    free_disk: Callable[[Path], int | None] = free_disk
    allocation: Allocation | None = None


def detect_machine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Machine:
    """Detect this machine. Never raises: anything unreadable becomes a note.

    `root` (of the file system) and `environ` (None: this process's) are parameters for tests.
    """
    environ = os.environ if environ is None else environ
    found = find_accelerators(root, environ)
    chip = found.chip or replace(CHIPS["cpu"], native_bf16=cpu_bf16_unit(root))
    return Machine(
        chip,
        found.devices,
        usable_cores(root),
        usable_memory(root),
        found.notes,
        allocation=find_allocation(environ),
    )


def cpu_bf16_unit(root: Path = Path("/")) -> str | None:
    """Return the CPU unit that multiplies bf16 faster than fp32 ("AMX"), or None."""
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
