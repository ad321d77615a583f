"""A real memory cgroup of this machine, nested under that of this process, so that its limits stay in force."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


class MemoryCgroup:
    """A cgroup with a limit: what a process in it starts is in it too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Have this process in it for a moment: what it starts is born in it, before it can look at its limits.

        The memory that this process has stays with the group that it comes back to.
        """
        own, _ = _own_group()
        self._add(self._folder)
        try:
            yield
        finally:
            self._add(own)

    @staticmethod
    def _add(folder: Path) -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[MemoryCgroup]:
    """A cgroup with a memory limit in bytes, empty at the end; skips the test where none can be made."""
    parent, limit_file = _own_group()
    folder = parent / f"megalaunch-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / limit_file).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    try:
        yield MemoryCgroup(folder)
    finally:
        deadline = time.monotonic() + 10
        while folder.exists():  # busy until the last process is reaped
            with contextlib.suppress(OSError):
                folder.rmdir()
            assert time.monotonic() < deadline, f"{folder} is still in use"
            time.sleep(0.05)


def _own_group() -> tuple[Path, str]:
    """The folder of this process's memory cgroup, and the file of its limit: of cgroup v1, else of v2."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
    path = next((path for _, controllers, path in groups if not controllers), "/")
    return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
