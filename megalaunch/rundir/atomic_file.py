"""Atomic file replacement, synced to disk before the rename: a crash leaves neither a partial nor an empty file.

A rename alone is not enough: after a power failure a file system may have stored the new name without the data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megalaunch.rundir.files import FILE_MODE, create_file


def write_file_atomically(path: Path, content: str | bytes, mode: int = FILE_MODE) -> None:
    """Replace `path` by `content` (text as UTF-8), synced to disk. Raises OSError and then leaves `path` unchanged."""
    with atomic_file(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path, mode: int = FILE_MODE) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, synced to disk, if the body succeeds; it is removed otherwise.

    One writer at a time. The temporary file of a killed writer is removed first; a symbolic link in its place is not
    followed.
    """
    temporary = temporary_path(path)
    descriptor = create_file(temporary, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def temporary_path(path: Path) -> Path:
    """Return the hidden temporary name of `path`, in the same directory."""
    return path.with_name(f".{path.name}.unfinished")


def sync_file(path: Path) -> None:
    """Sync an existing file and its directory entry to disk; do nothing if it does not exist. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    _sync(descriptor)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Sync the entries of a directory to disk. Raises OSError."""
    _sync(os.open(directory, os.O_RDONLY | os.O_CLOEXEC))


def sync_tree(directory: Path) -> None:
    """Sync all files and directories below `directory` to disk. Raises OSError."""
    for folder, _, files in os.walk(directory, onerror=_reraise):
        for name in files:
            _sync(os.open(Path(folder, name), os.O_RDONLY | os.O_CLOEXEC))
        sync_directory(Path(folder))


def _reraise(error: OSError) -> None:
    raise error


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
