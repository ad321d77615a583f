"""How many cores and how much memory this process may use: the machine's, within control-group limits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may keep busy: its affinity mask, and the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0))
    for folder in _group_folders(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return cores


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory this process may fill: the machine's, or the smallest limit of its control groups."""
    total = _machine_memory(root)
    for folder in _group_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _word(folder / name)
            if limit.isdigit():
                total = min(total, int(limit))
    return total


def free_disk(path: Path) -> int | None:
    """Bytes that this user may still write on the disk of a path that may not exist yet; None: it cannot be told."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.free if usage.total else None  # of size 0 are /proc and its like, where nothing can be written
    except (OSError, ValueError):  # not readable; no path at all
        return None


def _machine_memory(root: Path) -> int:
    """MemTotal in bytes; 0 where it cannot be read."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _group_folders(root: Path, controller: str) -> list[Path]:
    """The control-group folders that limit this process, innermost first, for version 2 and version 1.

    A limit of any parent holds too. In a container the path named in /proc often does not exist: the mount's top
    is then the container's own group, so the top is always among the folders.
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
    """Cores' worth of CPU time this control group may use, or None for no limit."""
    quota, period = (_word(folder / "cpu.max", index) for index in (0, 1))
    if not quota:
        quota, period = _word(folder / "cpu.cfs_quota_us"), _word(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) > 0 else None


def _word(path: Path, index: int = 0) -> str:
    """One word of a small file, "" where there is none."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return words[index] if index < len(words) else ""
