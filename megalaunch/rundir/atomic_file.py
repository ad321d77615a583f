"""Files that are replaced as a whole and are on disk before they have their name: no crash leaves half or an empty one.

A rename alone is not enough: after a power cut a file system may know the new name and not yet the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megalaunch.rundir.files import FILE_MODE, create_file


def write_file_atomically(path: Path, content: str | bytes, mode: int = FILE_MODE) -> None:
    """Replace `path` by `content` (text as UTF-8), synced to disk. Raises OSError, and then `path` is as before."""
    with atomic_file(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path, mode: int = FILE_MODE) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the body ends well, synced to disk; else it is removed.

    One writer at a time. What a killed writer left is removed first, and a symbolic link in its place not followed.
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
    """The hidden name beside `path` under which it is written."""
    return path.with_name(f".{path.name}.unfinished")


def sync_file(path: Path) -> None:
    """Force an existing file, and its name, to disk; a file that does not exist needs nothing. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    _sync(descriptor)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Force the names inside `directory` to disk. Raises OSError."""
    _sync(os.open(directory, os.O_RDONLY | os.O_CLOEXEC))


def sync_tree(directory: Path) -> None:
    """Force every file below `directory`, and every name, to disk. Raises OSError."""
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
