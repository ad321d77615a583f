"""How a checkpoint directory comes into being: under a temporary name, then by one rename.

A reader sees the old directory or the new one, never a part; whatever a killed save leaves starts with
`.unfinished-`.
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
    """A fresh, empty directory beside `directory`. Raises OSError."""
    make_directory(directory.parent)
    fresh = directory.parent / f"{UNFINISHED}{directory.name}-{secrets.token_hex(4)}"
    fresh.mkdir(mode=DIRECTORY_MODE)
    return fresh


def commit(unfinished: Path, directory: Path) -> None:
    """Give the finished directory its name, in place of whatever had it. Raises OSError."""
    sync_tree(unfinished)  # what was synced when it was written costs nothing more
    if directory.exists():
        _swap_directories(unfinished, directory)
        discard(unfinished)
    else:
        unfinished.rename(directory)
    sync_directory(directory.parent)


def remove(directory: Path) -> None:
    """Remove a finished directory; a kill in the middle leaves a leftover, never half a checkpoint."""
    leftover = create_temp(directory)
    directory.rename(leftover)
    discard(leftover)


def discard(directory: Path) -> None:
    """Remove a temporary directory with all it holds."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove what killed saves left in `parent`; only when no save can be under way there."""
    for leftover in leftovers(parent):
        discard(leftover)


def _swap_directories(first: Path, second: Path) -> None:
    """Swap two directories: at no moment is there none called `second`, where the filesystem can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(_AT_FDCWD, bytes(first), _AT_FDCWD, bytes(second), _RENAME_EXCHANGE) == 0:
        return
    aside = create_temp(second)
    second.rename(aside)
    first.rename(second)
    aside.rename(first)
