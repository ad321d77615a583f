"""A real memory cgroup of this machine, nested under that of this process, so that its limits stay in force."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


class MemoryCgroup:
    """A cgroup with a limit: what a process in it starts is in it too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pid: int) -> None:
        """Move a process into it, and the children that it has started already; later ones are born in it."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # one that has ended
            (self._folder / "cgroup.procs").write_text(str(pid))
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                for child in children.read_text().split():
                    self.add(int(child))


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
