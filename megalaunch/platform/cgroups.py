"""CPU cores and memory available to this process: the machine's, within cgroup limits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalaunch.format.numbers import format_bytes

_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroup v2, of v1
_MEMORY_PEAKS = ("memory.peak", "memory.max_usage_in_bytes")


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of usable cores: the affinity mask, capped by the CPU quota of the cgroups."""
    cores = len(os.sched_getaffinity(0))
    for folder in _group_folders(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return cores


def usable_memory(root: Path = Path("/")) -> int:
    """Return the usable memory in bytes: the machine's, capped by the smallest cgroup limit."""
    total = _machine_memory(root)
    limits = (_number_in(folder, _MEMORY_LIMITS) for folder in _group_folders(root, "memory"))
    return min([total, *(limit for limit in limits if limit is not None)])


@dataclass(frozen=True)
class OomKill:
    """A kill by the kernel for memory: limit and peak of the cgroup in bytes.

    Without a limit it is the machine's, or that of a cgroup that this process is not in: one counter has both.

    The text of it is the reason in failure reports.
    """

    limit: int | None
    peak: int | None

    def __str__(self) -> str:
        if self.limit is None:
            return "killed by the kernel for memory: of the machine, or of a cgroup that is not seen from here"
        peak = "" if self.peak is None else f", peak {format_bytes(self.peak)}"
        return f"killed by the kernel for memory: limit of its cgroup {format_bytes(self.limit)}{peak}"


@dataclass(frozen=True)
class OomKills:
    """Processes that the kernel has killed for memory: in each cgroup that limits this process, and on the machine."""

    by_group: Mapping[Path, int]
    machine: int
    root: Path

    @classmethod
    def count(cls, root: Path = Path("/")) -> OomKills:
        """Count them now; a count that cannot be read is 0."""
        groups = {folder: _oom_kills(folder) for folder in _group_folders(root, "memory")}
        return cls(groups, _named_number(root / "proc/vmstat", "oom_kill"), root)

    def since(self) -> OomKill | None:
        """Return a kill since the count, with the smallest limit that led to it; None if no process was killed.

        The limit may be that of a parent: cgroup v1 counts a kill only in the group of the killed process. The
        machine's counter includes the kills in cgroups that are not seen here.
        """
        killed = [folder for folder, before in self.by_group.items() if _oom_kills(folder) > before]
        limits = [
            (limit, group)
            for group in self.by_group
            if any(folder.is_relative_to(group) for folder in killed)
            and (limit := _number_in(group, _MEMORY_LIMITS)) is not None
            and limit < (_machine_memory(self.root) or limit + 1)
        ]
        if limits:
            limit, group = min(limits)
            return OomKill(limit, _number_in(group, _MEMORY_PEAKS))
        on_machine = _named_number(self.root / "proc/vmstat", "oom_kill") > self.machine
        return OomKill(None, None) if killed or on_machine else None


def free_disk(path: Path) -> int | None:
    """Return the free bytes on the disk of a path that may not exist yet; None if unknown."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.free if usage.total else None  # a total of 0: /proc and the like, which are not writable
    except (OSError, ValueError):  # unreadable, or no valid path
        return None


def _machine_memory(root: Path) -> int:
    """Return MemTotal in bytes; 0 if it cannot be read."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _group_folders(root: Path, controller: str) -> list[Path]:
    """Return the cgroup folders that limit this process, innermost first, for cgroup v1 and v2.

    The limits of all parents apply. In a container the path in /proc often does not exist: the root of the mount is
    then the container's own group, so the root is always included.
    """
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return []
    folders: list[Path] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = mount / path.lstrip("/")
        folders += [inner, *(parent for parent in inner.parents if parent.is_relative_to(mount))]
    return folders


def _cpu_quota(folder: Path) -> float | None:
    """Return the CPU quota of a cgroup in cores; None without a limit."""
    quota, period = (_field(folder / "cpu.max", index) for index in (0, 1))
    if not quota:
        quota, period = _field(folder / "cpu.cfs_quota_us"), _field(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None


def _field(path: Path, index: int = 0) -> str:
    """Return one whitespace-separated field of a small file; "" if there is none."""
    try:
        fields = path.read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return fields[index] if index < len(fields) else ""


def _number_in(folder: Path, names: Sequence[str]) -> int | None:
    """Return the number in the first of these files of a cgroup that has one; None: there is none, or it is "max"."""
    fields = (_field(folder / name) for name in names)
    return next((int(field) for field in fields if field.isdigit()), None)


def _oom_kills(folder: Path) -> int:
    """Return the kills for memory in a cgroup: of cgroup v2, whose count includes the groups below, or of v1."""
    return _named_number(folder / "memory.events", "oom_kill") + _named_number(
        folder / "memory.oom_control", "oom_kill"
    )


def _named_number(path: Path, name: str) -> int:
    """Return the number after a name in a file of lines "name number"; 0 without it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
