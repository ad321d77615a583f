"""Directories made once and then found by a key: published by one rename, safe against kills and rivals."""

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
    """`root/key`, filled by `build` when it is missing or not `intact`.

    `build` gets an empty folder, which appears under its name only when `build` returns. Of two processes
    with the same key one builds, the other calls `waiting` once and waits; what a killed one left is
    removed. DataError when the folder cannot be written or the disk is full.
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
    for leftover in root.glob(f".{key}.unfinished-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{key}.unfinished-", dir=root))
    try:
        build(unfinished)
        sync_tree(unfinished)  # else a power cut may leave files of zeros under the final name
        unfinished.chmod(0o755)
        if (root / key).exists():  # damaged: put aside under a name that the next build removes
            (root / key).rename(Path(tempfile.mkdtemp(prefix=f".{key}.unfinished-", dir=root), "damaged"))
        unfinished.rename(root / key)
        sync_directory(root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _file_lock(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold `lock`; the kernel lets go of it when the holder dies."""
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
