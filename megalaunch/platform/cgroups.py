"""CPU cores and memory available to this process: the machine's, within cgroup limits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
    for folder in _group_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _field(folder / name)
            if limit.isdigit():
                total = min(total, int(limit))
    return total


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
