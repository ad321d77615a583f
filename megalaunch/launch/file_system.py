"""Properties of a folder's file system: whether its locks reach other machines, and the clock that stamps its files."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from megalaunch.fs import PRIVATE_MODE, open_file

_MOUNTS = Path("/proc/self/mountinfo")
# File systems shared with other machines whose flock is local to this kernel: by type, or by an option of nfs(5),
# mount.lustre(8) or mount.cifs(8).
_LOCAL_LOCK_TYPES = re.compile(r"fuse(\..*)?|9p|virtiofs|vboxsf")
_LOCAL_LOCK_OPTIONS = {"nolock", "local_lock=flock", "local_lock=all", "localflock", "nobrl"}


def has_local_locks(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Return whether other machines may share the file system of `path` without honouring an flock held here."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    place, found = os.path.realpath(path), ("", "", set[str]())
    for line in lines:  # proc(5): id parent major:minor root mount_point options ... - type source super_options
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        covers = place == point or place.startswith(point.rstrip("/") + "/")
        if covers and len(point) >= len(found[0]):  # a later mount at the same place hides the earlier one
            kind, *more = rest.split()
            found = (point, kind, set(",".join([fields.split()[5], *more[1:]]).split(",")))
    _, kind, options = found
    return bool(_LOCAL_LOCK_TYPES.fullmatch(kind) or options & _LOCAL_LOCK_OPTIONS)


def file_system_time(folder: Path) -> float:
    """Return the time of the clock that stamps files in `folder`, seconds since 1970; local if not writable.

    A network file system stamps files by its server's clock.
    """
    probe = folder / ".lock.unfinished"
    try:
        descriptor = open_file(probe, os.O_WRONLY | os.O_CREAT, PRIVATE_MODE)
    except OSError:
        return time.time()
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            probe.unlink()
