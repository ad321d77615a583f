"""The fencing token of a run: only the workers that started last may change what is in its directory.

Workers may come back after others have taken their place: a stopped process that continues, a machine whose network was
cut. The lock of the launcher does not stop them, as it belongs to another process.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megalaunch.fs import has_no_locks, open_file, sync_file, try_lock
from megalaunch.process import find_process, holds_flock, is_stopped, is_traced, kill_all
from megalaunch.rundir.jsonl import Record, append_line, read_last_lines

_TAIL_BYTES = 4096  # more than the last line
HELD_SECONDS = 60.0  # a holder renames or removes files, which takes less, or its process is stopped
STOPPED_SECONDS = 3.0  # after which a stopped holder on this machine is killed


class Superseded(Exception):
    """Later workers have taken over the run: these must change nothing any more, and end with exit code 75."""


class Fence:
    """The right of one attempt, a start of all workers of a run, to change the files of the run directory.

    Rank 0 of each attempt appends a line with the next number to `attempts.jsonl`; the highest number has the right.
    `hold` checks it under the flock that a claim takes too: while an attempt publishes, no later one can start, and
    after a later one has started, none publishes. A stopped holder would keep every later attempt from starting: a
    claim kills it if it is on this machine, and fails if it is not.

    On a file system without flock, or whose flock is local to each machine (NFS with `nolock` or `local_lock`, Lustre
    with `localflock`), the check and the change that follows are no atomic operation: a process that is suspended
    between the two, for a few microseconds, and continues after a later attempt has started, is not stopped. `check` is
    such a check everywhere; it comes before appended lines, which replace nothing.

    Args:
        path: `attempts.jsonl`.
        restarted: whether the agent, the parent of this process, has started workers of this run before. If others have
            claimed a number since, their agent is the one that continues.

    Attributes:
        number: of this attempt, from 1; None before it is known, when nothing is refused.
        killed: a sentence on the stopped process that this claim has killed, or "".
    """

    def __init__(self, path: Path, restarted: bool = False) -> None:
        self._path, self._restarted = path, restarted
        self.number: int | None = None
        self.killed = ""

    def claim(self) -> None:
        """Take the next number, for this process and the other ranks of its attempt.

        Raises:
            Superseded: workers of another agent have claimed a number since this one started its first.
            OSError: the file cannot be written, or an earlier attempt on another machine is stopped while it changes
                files.
        """
        with self._locked(self._kill_stopped_holder):
            newest = self._newest()
            if self._restarted and (newest.get("host"), newest.get("agent")) != (socket.gethostname(), os.getppid()):
                raise Superseded(_replaced_by(newest, "the workers of this agent change nothing more and end"))
            self.number = int(newest.get("attempt", 0)) + 1
            record = {"attempt": self.number, "host": socket.gethostname(), "pid": os.getpid(), "agent": os.getppid()}
            append_line(self._path, {**record, "time": time.time()})
            sync_file(self._path)

    def follow(self, agent: int | None = None) -> None:
        """Take the number of the newest attempt, for the launcher of its workers.

        Args:
            agent: the process of an agent on this machine: the number changes only if it is this agent's; None: always.
        """
        newest = self._newest()
        if agent is None or (newest.get("host"), newest.get("agent")) == (socket.gethostname(), agent):
            self.number = int(newest.get("attempt", 0))

    def check(self) -> None:
        """Raise Superseded if a later attempt has started."""
        if self.number is None:
            return
        newest = self._newest()
        if int(newest.get("attempt", 0)) > self.number:
            raise Superseded(_replaced_by(newest, f"attempt {self.number} changes nothing more and ends"))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep later attempts from starting while the body changes files.

        Raises:
            Superseded: a later attempt has started; the body does not run.
        """
        if self.number is None:
            yield
            return
        with self._locked():
            self.check()
            yield

    def _newest(self) -> Record:
        return next(iter(deque(read_last_lines(self._path, _TAIL_BYTES), maxlen=1)), {})

    @contextmanager
    def _locked(self, wait: Callable[[int, float], None] = lambda descriptor, waited: None) -> Iterator[None]:
        """Hold the flock, where the file system has it; call `wait` with the seconds while another has it."""
        descriptor = open_file(self._path, os.O_RDWR | os.O_CREAT)
        try:
            began = time.monotonic()
            while not _try_lock(descriptor):
                waited = time.monotonic() - began
                if waited > HELD_SECONDS:
                    holder = self._newest()
                    raise OSError(errno.EBUSY, f"is locked by {_describe(holder)}: end that process", str(self._path))
                wait(descriptor, waited)
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    def _kill_stopped_holder(self, descriptor: int, waited: float) -> None:
        """Kill the process of the newest attempt if it is on this machine, has the lock and is stopped by a signal."""
        newest = self._newest()
        if waited < STOPPED_SECONDS or newest.get("host") != socket.gethostname():
            return
        holder = find_process(int(newest.get("pid", 0)))
        if holder is None or not is_stopped(holder) or is_traced(holder) or not holds_flock(holder, descriptor):
            return
        kill_all([holder], 1.0)
        self.killed = f"{_describe(newest)} was stopped while it changed files of the run, and has been killed"


def _try_lock(descriptor: int) -> bool:
    """Take the lock; True also where there are none."""
    try:
        return try_lock(descriptor)
    except OSError as error:
        if has_no_locks(error):
            return True
        raise


def _describe(record: Record) -> str:
    return f"attempt {record.get('attempt')} (process {record.get('pid')} on {record.get('host')})"


def _replaced_by(newest: Record, stale: str) -> str:
    return f"{_describe(newest)} has taken over the run: {stale}"
