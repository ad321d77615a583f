"""What the file system of a folder can be relied on for: whose locks it knows, and what time it has."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# Shared with other machines, with an flock that only this kernel knows: always so, or by an option of nfs(5),
# mount.lustre(8) or mount.cifs(8).
_LOCAL_LOCK_TYPES = re.compile(r"fuse(\..*)?|9p|virtiofs|vboxsf")
_LOCAL_LOCK_OPTIONS = {"nolock", "local_lock=flock", "local_lock=all", "localflock", "nobrl"}


def has_local_locks(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether other machines may share the file system of `path` without seeing who holds an flock there."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    place, found = os.path.realpath(path), ("", "", set[str]())
    for line in lines:  # proc(5): id parent major:minor root mount_point options ... - type source super_options
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        covers = place == point or place.startswith(point.rstrip("/") + "/")
        if covers and len(point) >= len(found[0]):  # a later mount at the same place lies on top
            kind, *more = rest.split()
            found = (point, kind, set(",".join([fields.split()[5], *more[1:]]).split(",")))
    _, kind, options = found
    return bool(_LOCAL_LOCK_TYPES.fullmatch(kind) or options & _LOCAL_LOCK_OPTIONS)


def file_system_time(folder: Path) -> float:
    """Seconds since 1970 by the clock that stamps files there, which may be a server's; ours where we cannot write."""
    probe = folder / ".lock.unfinished"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return time.time()
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            probe.unlink()
