"""One launcher per run directory: a lock that names its holder and ends with the holder's process.

The kernel's flock decides, and is released when its process ends; the file's contents only name the holder. Where flock
is not supported, or is local to one of several machines, the holder's heartbeat decides: the time since it touched the
file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megalaunch.format.paths import display_path
from megalaunch.fs import has_no_locks, is_open_at, open_file, try_lock
from megalaunch.launch.file_system import file_system_time, has_local_locks
from megalaunch.process import Process, find_process, is_alive

SILENT_SECONDS = 60.0  # a holder on another machine counts as dead after so long without a touch
TOUCH_SECONDS = 10.0
_PROBE_SECONDS = 0.1  # `is_locked` takes the lock for a moment, so a failed attempt is repeated for so long


@dataclass(frozen=True)
class Holder:
    """The process that holds a run directory; `since` is in seconds since 1970, `started` in clock ticks since boot."""

    pid: int
    started: int
    host: str
    since: float

    def describe(self) -> str:
        """Return `process 12 on host since 2026-11-21 10:00:00`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since}"


class RunLocked(Exception):
    """Another launcher holds the run directory."""

    def __init__(self, path: Path, holder: Holder | None) -> None:
        self.holder = holder
        process = holder.describe() if holder else "another process"
        super().__init__(f"{display_path(path.parent)} is in use by {process}")


class RunLock:
    """A lock from construction to `release`. Raises RunLocked, or OSError when the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched = time.monotonic()
        while True:
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                self._take()
            except BaseException:
                os.close(self._descriptor)
                raise
            if is_open_at(self._descriptor, self._path):
                return
            os.close(self._descriptor)  # its last holder removed the file between our open and our flock

    def _take(self) -> None:
        """Take the flock and write this process as the holder; check the heartbeat if flock is not decisive."""
        decided = _take_flock(self._descriptor)
        if decided is False:
            raise RunLocked(self._path, read_holder(self._path))
        if decided is None or has_local_locks(self._path):
            holder = read_holder(self._path)
            if holder and _has_heartbeat(holder, self._path):
                raise RunLocked(self._path, holder)
        process = find_process(os.getpid())
        started = process.started if process else 0
        text = json.dumps(asdict(Holder(os.getpid(), started, socket.gethostname(), time.time())))
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def touch(self) -> None:
        """Update the heartbeat for machines that cannot see this process; cheap to call often, raises nothing."""
        if time.monotonic() - self._touched > TOUCH_SECONDS:
            with contextlib.suppress(OSError):  # read-only for a time: the next call tries again
                os.utime(self._descriptor)
                self._touched = time.monotonic()

    def release(self) -> None:
        """Remove the file and release the lock; raises nothing, as a file that remains blocks no other launcher."""
        with contextlib.suppress(OSError):
            if is_open_at(self._descriptor, self._path):
                self._path.unlink(missing_ok=True)
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a launcher holds the lock at `path` now; does not change the file."""
    try:
        descriptor = open_file(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        free = _take_flock(descriptor, shared=True)
    except OSError:  # the storage fails: the heartbeat decides
        free = None
    finally:
        os.close(descriptor)
    if free is False:
        return True
    if free and not has_local_locks(path):
        return False
    holder = read_holder(path)
    return holder is not None and _has_heartbeat(holder, path)


def _take_flock(descriptor: int, shared: bool = False) -> bool | None:
    """Take an flock: True if taken, False if another process holds it, None if the file system has no locks.

    Raises OSError if the storage fails.
    """
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        try:
            if try_lock(descriptor, shared):
                return True
        except OSError as error:
            if has_no_locks(error):
                return None
            raise
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PROBE_SECONDS / 5)


def read_holder(path: Path) -> Holder | None:
    """Return the holder that the file names, alive or not, or None when it names none."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _has_heartbeat(holder: Holder, path: Path) -> bool:
    """Return whether a holder is alive: by its process on this machine, else by the time since it touched the lock.

    That time is measured by the file system's own clock, since the clocks of two machines may differ by an hour.
    """
    if holder.host == socket.gethostname():
        same_process = holder.pid == os.getpid()
        return not same_process and is_alive(Process(holder.pid, holder.started))
    try:
        return file_system_time(path.parent) - path.stat().st_mtime < SILENT_SECONDS
    except OSError:
        return False
