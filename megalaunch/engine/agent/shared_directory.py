"""Check that all nodes share the run directory: files of one are seen on the others, and so are locks."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megalaunch.engine.agent.node_report import Problem
from megalaunch.fs import PRIVATE_MODE, lock_file, make_directory, open_file, try_lock, write_file_atomically

SEEN_SECONDS = 8.0
"""A network file system remembers for some seconds that a file was absent."""
_POLL_SECONDS = 0.05
_PREFIX = ".preflight-"


class SharedDirectory:
    """Node 0's side: a folder in the run directory with a file of each node, and a lock that node 0 holds.

    Args:
        root: run directory.
    """

    def __init__(self, root: Path) -> None:
        self._root, self.token = root, secrets.token_hex(8)
        self._folder, self._lock = _folder(root, self.token), -1

    def begin(self) -> Problem | None:
        """Write node 0's file and take the lock; returns why that failed."""
        for left in self._root.glob(f"{_PREFIX}*"):  # of a node 0 that was killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            make_directory(self._folder)
            with contextlib.suppress(BlockingIOError):
                self._lock = lock_file(self._folder / "lock", PRIVATE_MODE)
            _write(self._folder, 0)
        except OSError as error:
            return _not_writable(self._root, error)
        return None

    def unseen(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes whose file is not seen on node 0 after some seconds."""
        files = {node: _file(self._folder, node) for node in nodes}
        _wait_until(lambda: all(path.exists() for path in files.values()), self._folder)
        return [node for node, path in files.items() if not path.exists()]

    def end(self) -> None:
        """Release the lock and remove the folder."""
        if self._lock >= 0:
            os.close(self._lock)
        shutil.rmtree(self._folder, ignore_errors=True)


def check_shared(root: Path, token: str, node: int) -> tuple[Problem | None, bool]:
    """Look for node 0's file, write this node's, try the lock; blocks for some seconds if the file is not seen.

    Returns:
        What is wrong, and whether node 0's lock is seen here. Locks are not tried where something is wrong.
    """
    folder = _folder(root, token)
    if not _wait_until(lambda: _file(folder, 0).exists(), folder):
        return not_shared(root), True
    try:
        _write(folder, node)
        lock = open_file(folder / "lock", os.O_RDWR)
    except OSError as error:
        return _not_writable(root, error), True
    try:
        return None, not try_lock(lock)
    except OSError:  # no locks at all: the lock of a run knows that
        return None, True
    finally:
        os.close(lock)


def not_shared(root: Path) -> Problem:
    """Return the problem of a node that has another run directory than node 0."""
    return Problem(
        f"{root} there is not node 0's",
        "all nodes must share the run directory; set run.directory to a path on a shared file system",
    )


def _not_writable(root: Path, error: OSError) -> Problem:
    return Problem(f"{root} cannot be written ({error.strerror})", "make it writable for this user on every node")


def _folder(root: Path, token: str) -> Path:
    return root / f"{_PREFIX}{token}"


def _file(folder: Path, node: int) -> Path:
    return folder / f"node_{node}"


def _write(folder: Path, node: int) -> None:
    write_file_atomically(_file(folder, node), f"{node}\n", PRIVATE_MODE)  # synced, then renamed


def _wait_until(condition: Callable[[], bool], folder: Path) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):
            list(folder.iterdir())  # NFS looks again for files that it has reported as absent
    return True
