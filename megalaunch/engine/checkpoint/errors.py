"""What goes wrong with a checkpoint, in a user's words.

One exception type; the messages name the path, the numbers and what to do.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from megalaunch.rundir.checkpoint.errors import CheckpointError
from megalaunch.rundir.checkpoint.listing import directory_size

__all__ = ["CheckpointError", "format_bytes", "free_bytes", "no_space", "write_error"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


def format_bytes(count: int) -> str:
    """`72.3 MB`, decimal units."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def free_bytes(path: Path) -> int:
    """Bytes that a user may still write on the filesystem of `path` (or of its nearest existing parent)."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def write_error(directory: Path, unfinished: Path | None, needed: int, error: OSError) -> CheckpointError:
    """The error for a failed write of the checkpoint `directory`, which needs `needed` bytes in all.

    What stands in `unfinished` will be removed, so its bytes count as free.
    """
    if error.errno in _FULL:
        own = directory_size(unfinished) if unfinished else 0
        return no_space(directory, needed, free_bytes(directory.parent) + own)
    where = error.filename or directory
    if error.errno == errno.EFBIG:
        return CheckpointError(
            f"cannot save the checkpoint {directory}: a file grew past the limit on file sizes "
            f"(the checkpoint needs {format_bytes(needed)} in all; raise the limit: `ulimit -f unlimited`)"
        )
    return CheckpointError(f"cannot save the checkpoint {directory}: {where}: {os.strerror(error.errno or 0)}")


def no_space(directory: Path, needed: int, free: int) -> CheckpointError:
    """The error for a full disk: needed and free bytes, and what may be removed."""
    missing = max(needed - free, 0)
    wanted = f"free {format_bytes(missing)} or more" if missing else "free some space"
    return CheckpointError(
        f"no space left for the checkpoint {directory}: it needs {format_bytes(needed)}, "
        f"{format_bytes(free)} are free; {wanted} on that disk{_removable(directory)}, then run the same command again"
    )


def _removable(directory: Path) -> str:
    """Older checkpoints beside this one; the newest of them is what a resume needs, so it is not offered."""
    others = sorted(path for path in directory.parent.glob("step_*") if path.is_dir() and path.name < directory.name)
    if len(others) < 2:
        return ""
    oldest = others[0]
    held = format_bytes(directory_size(oldest))
    return f" (the oldest checkpoint there, {oldest.name}, holds {held}; checkpoint.keep_last keeps fewer)"
