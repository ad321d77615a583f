"""Atomic commit of a checkpoint directory: write under a temporary name, then rename once.

A reader sees the old directory or the new one, never a partial one. The names of temporary directories that a killed
save leaves behind start with `.unfinished-`.
"""

from __future__ import annotations

import ctypes
import secrets
import shutil
from pathlib import Path

from megalaunch.rundir.atomic_file import sync_directory, sync_tree
from megalaunch.rundir.checkpoint.listing import UNFINISHED, leftovers
from megalaunch.rundir.files import DIRECTORY_MODE, make_directory

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def create_temp(directory: Path) -> Path:
    """Create an empty temporary directory with the same parent as `directory`. Raises OSError."""
    make_directory(directory.parent)
    fresh = directory.parent / f"{UNFINISHED}{directory.name}-{secrets.token_hex(4)}"
    fresh.mkdir(mode=DIRECTORY_MODE)
    return fresh


def commit(unfinished: Path, directory: Path) -> None:
    """Sync the temporary directory to disk and rename it to `directory`, replacing an existing one. Raises OSError."""
    sync_tree(unfinished)  # files that were synced when they were written cost nothing more
    if directory.exists():
        _swap_directories(unfinished, directory)
        discard(unfinished)
    else:
        unfinished.rename(directory)
    sync_directory(directory.parent)


def remove(directory: Path) -> None:
    """Remove a committed directory, renamed first: a kill leaves a temporary directory, never half a checkpoint."""
    leftover = create_temp(directory)
    directory.rename(leftover)
    discard(leftover)


def discard(directory: Path) -> None:
    """Remove a temporary directory and its contents."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove the temporary directories of killed saves in `parent`. No save may be in progress there."""
    for leftover in leftovers(parent):
        discard(leftover)


def _swap_directories(first: Path, second: Path) -> None:
    """Exchange two directories.

    renameat2(RENAME_EXCHANGE) does it atomically. Without it (an old kernel, some filesystems) three renames do, and
    `second` is missing for a moment.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(_AT_FDCWD, bytes(first), _AT_FDCWD, bytes(second), _RENAME_EXCHANGE) == 0:
        return
    aside = create_temp(second)
    second.rename(aside)
    first.rename(second)
    aside.rename(first)
