"""Directories built once and then found by key: published by one rename, safe against kills and concurrent builds."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megalaunch.data.errors import cannot
from megalaunch.rundir.atomic_file import sync_directory, sync_tree

_OTHER_PLACE = "Free space there, or choose another folder with data.cache_directory=PATH."


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
        with _file_lock(root / f".{key}.lock", waiting):
            if not intact(final):
                _build_and_publish(root, key, build)
    except OSError as error:
        raise cannot("keep prepared data here", root, error, _OTHER_PLACE) from error
    return final


def _build_and_publish(root: Path, key: str, build: Callable[[Path], None]) -> None:
    """Build in a temporary directory, flush it to disk, and rename it to `root/key`."""
    for leftover in root.glob(f".{key}.unfinished-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{key}.unfinished-", dir=root))
    try:
        build(unfinished)
        sync_tree(unfinished)  # otherwise a power failure may leave files of zeros under the final name
        unfinished.chmod(0o755)
        if (root / key).exists():  # damaged: renamed so that the next build removes it
            (root / key).rename(Path(tempfile.mkdtemp(prefix=f".{key}.unfinished-", dir=root), "damaged"))
        unfinished.rename(root / key)
        sync_directory(root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _file_lock(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `lock`; the kernel releases it when the holder dies."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
