"""Checkpoint errors for users: one exception type, whose messages give the path, the numbers and the remedy."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from megalaunch.format.numbers import format_bytes
from megalaunch.rundir.checkpoint.errors import CheckpointError, StorageError
from megalaunch.rundir.checkpoint.listing import directory_size
from megalaunch.rundir.storage_wait import may_pass, remedy

__all__ = ["CheckpointError", "StorageError", "free_bytes", "no_space", "storage_error", "write_error"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


def free_bytes(path: Path) -> int:
    """Return the bytes available to this user on the filesystem of `path`, or of its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def write_error(directory: Path, unfinished: Path | None, needed: int, error: OSError) -> CheckpointError:
    """Make the CheckpointError for a failed write.

    Args:
        directory: the checkpoint that was being written.
        unfinished: its temporary directory. It will be removed, so its bytes count as free.
        needed: size of the checkpoint in bytes.
        error: the cause.
    """
    if error.errno in _FULL:
        own = directory_size(unfinished) if unfinished else 0
        return no_space(directory, needed, free_bytes(directory.parent) + own)
    where = error.filename or directory
    if error.errno == errno.EFBIG:
        return CheckpointError(
            f"cannot save the checkpoint {directory}: a file exceeds the limit on file sizes "
            f"(the checkpoint needs {format_bytes(needed)}; raise the limit: `ulimit -f unlimited`)"
        )
    return storage_error(
        f"cannot save the checkpoint {directory}: {where}: {os.strerror(error.errno or 0)}", directory, error
    )


def storage_error(message: str, path: Path, error: OSError) -> CheckpointError:
    """Make the CheckpointError for an OSError at `path`: a StorageError if a later try may succeed."""
    if not may_pass(error):
        return CheckpointError(message)
    return _storage_error(message, path, os.strerror(error.errno or 0), remedy(error))


def _storage_error(message: str, path: Path, reason: str, fix: str) -> StorageError:
    made = StorageError(message)
    made.path, made.reason, made.fix = str(path), reason, fix
    return made


def no_space(directory: Path, needed: int, free: int) -> StorageError:
    """Make the error for a full disk: the needed and the free bytes, and a checkpoint that may be removed."""
    missing = max(needed - free, 0)
    reason = f"it needs {format_bytes(needed)}, {format_bytes(free)} are free"
    fix = f"free {format_bytes(missing)} or more" if missing else "free space"
    fix = f"{fix} on that disk{_removable(directory)}"
    message = f"no space left for the checkpoint {directory}: {reason}; {fix}, then run the same command to resume"
    return _storage_error(message, directory, reason, fix)


def _removable(directory: Path) -> str:
    """Suggest the oldest checkpoint for removal, or nothing if there is only one: a resume needs the newest."""
    others = sorted(path for path in directory.parent.glob("step_*") if path.is_dir() and path.name < directory.name)
    if len(others) < 2:
        return ""
    oldest = others[0]
    size = format_bytes(directory_size(oldest))
    return f" (the oldest checkpoint there, {oldest.name}, takes {size}; a lower checkpoint.keep_last retains fewer)"
