"""Detect this machine without torch: accelerators, cores, memory, bf16 unit.

Device nodes show whether there are accelerators, the driver's tool identifies them, and the CPU flags give its units.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalaunch.platform.accelerators import Accelerators, find_accelerators
from megalaunch.platform.allocation import Allocation, find_allocation
from megalaunch.platform.cgroups import free_disk, usable_cores, usable_memory
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.platforms import PlatformFacts
from megalaunch.platform.plugins import PlatformError, all_platforms
from megalaunch.platform.selection import count_devices, missing_devices, requested_platform


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
        problem: why the platform that the environment asks for cannot be used; None: it can, or none is asked for.
    """

    chip: ChipFacts
    devices: int
    cores: int
    memory_bytes: int
    notes: tuple[str, ...]
    free_disk: Callable[[Path], int | None] = free_disk
    allocation: Allocation | None = None
    problem: str | None = None


def detect_machine(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Machine:
    """Detect this machine. Never raises: anything unreadable becomes a note.

    `root` (of the file system) and `environ` (None: this process's) are parameters for tests.
    """
    environ = os.environ if environ is None else environ
    try:
        found, problem = _select(root, environ)
    except PlatformError as error:
        found, problem = Accelerators(None, 0, ()), error.cause
    chip = found.chip or replace(CHIPS["cpu"], native_bf16=cpu_bf16_unit(root))
    return Machine(
        chip,
        found.devices,
        usable_cores(root),
        usable_memory(root),
        found.notes,
        allocation=find_allocation(environ),
        problem=problem,
    )


def _select(root: Path, environ: Mapping[str, str]) -> tuple[Accelerators, str | None]:
    """Return the devices of the platform that is asked for, or of the preferred one that has any; and a problem."""
    asked = requested_platform(environ)
    if asked is not None and asked.facts is None:
        return Accelerators(None, 0, ()), asked.unknown
    notes: tuple[str, ...] = ()
    for facts in [asked.facts] if asked is not None and asked.facts is not None else all_platforms().values():
        found = _find_devices(facts, root, environ)
        notes = (*notes, *found.notes)
        if found.devices or facts.device == "cpu":
            return replace(found, notes=notes), None
    if asked is None or asked.facts is None:
        return Accelerators(None, 0, notes), None
    return Accelerators(None, 0, notes), f"{asked.variable}={asked.name}: {missing_devices(asked.facts)}"


def _find_devices(facts: PlatformFacts, root: Path, environ: Mapping[str, str]) -> Accelerators:
    """Return the devices of one platform. Only the chips of cuda are told apart; the others' rows have its name."""
    if facts.device == "cpu":
        return Accelerators(None, 0, ())
    if facts.device == "cuda":
        return find_accelerators(root, environ)
    count = count_devices(facts, root, environ)
    chips = [chip for chip in CHIPS.values() if chip.device == facts.device]
    generic = next((chip for chip in chips if chip.name == facts.device), chips[0] if chips else None)
    if count and generic is None:
        raise PlatformError(f"the platform {facts.device} has {count} devices and no chip in its plug-in")
    return Accelerators(generic, count, ())


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
