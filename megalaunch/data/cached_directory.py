"""Directories built once and then found by key: published by one rename, safe against kills and concurrent builds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megalaunch.data.errors import cannot
from megalaunch.fs import (
    PUBLIC_DIRECTORY_MODE,
    PUBLIC_FILE_MODE,
    create_temporary_directory,
    discard_directory,
    list_temporary_directories,
    lock_file,
    publish_directory,
)

_OTHER_PLACE = "Free disk space, or set data.cache_directory=PATH to another directory."


def cached_directory(
    root: Path, key: str, build: Callable[[Path], None], intact: Callable[[Path], bool], waiting: Callable[[], None]
) -> Path:
    """Return `root/key`; call `build` to fill it if it is missing or not `intact`.

    Args:
        root: directory of all cached directories.
        key: name of this one, a hash of everything that its content depends on.
        build: fills the empty directory that it is given, which gets its final name only when `build` returns.
        intact: whether an existing directory is complete.
        waiting: called once if another process builds the same key; this process then waits for it.

    Raises:
        DataError: the directory is not writable or the disk is full.

    Leftovers of killed processes are removed.
    """
    final = root / key
    if intact(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = lock_file(root / f".{key}.lock", PUBLIC_FILE_MODE, waiting)
        try:
            if not intact(final):
                _build_and_publish(root, key, build)
        finally:
            os.close(lock)
    except OSError as error:
        raise cannot("write the data cache here", root, error, _OTHER_PLACE) from error
    return final


def _build_and_publish(root: Path, key: str, build: Callable[[Path], None]) -> None:
    """Build in a temporary directory and publish it as `root/key`; a damaged one of that name is replaced."""
    for leftover in list_temporary_directories(root, key):
        discard_directory(leftover)
    unfinished = create_temporary_directory(root / key, PUBLIC_DIRECTORY_MODE)
    try:
        build(unfinished)
        publish_directory(unfinished, root / key)
    finally:
        discard_directory(unfinished)
