"""Writes that wait in memory while the storage of a run directory fails, and follow in order when it is back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalaunch.rundir.storage_wait import StorageWait, may_pass


@dataclass(frozen=True)
class FailedWrite:
    """A write that failed: the file, and why."""

    path: Path
    error: OSError

    @property
    def message(self) -> str:
        """`PATH cannot be written: No space left on device`."""
        return f"{self.path} cannot be written: {self.error.strerror}"


class PendingWrites:
    """A queue of writes for each file. Threads may share it; a write may itself add writes.

    Args:
        wait: Decides when a failed write is tried again.
        begins: Called with the first failed write of a wait.
        ends: Called with that write, and the seconds of the wait, when nothing fails any more.
    """

    def __init__(
        self,
        wait: StorageWait,
        begins: Callable[[FailedWrite], None] = lambda failed: None,
        ends: Callable[[FailedWrite, float], None] = lambda failed, seconds: None,
    ) -> None:
        self._wait, self._begins, self._ends = wait, begins, ends
        self._queues: dict[Path, deque[Callable[[], object]]] = {}
        self._failing: dict[Path, OSError] = {}  # files whose next write waits for the storage
        self._lock, self._flushing = threading.RLock(), False
        self.failed: FailedWrite | None = None
        """The first failed write of the wait; None if nothing waits."""
        self.refused: FailedWrite | None = None
        """The first write that was dropped, since its error does not pass."""

    def add(self, path: Path, write: Callable[[], object]) -> None:
        """Write now, or after the writes to this file that wait. Raises nothing for an OSError of `write`."""
        with self._lock:
            self._queues.setdefault(path, deque()).append(write)
            self.flush()

    def flush(self, at_once: bool = False) -> None:
        """Try all writes, those that failed only if their next try is due, or `at_once`."""
        with self._lock:
            if self._flushing or not self._queues:
                return
            self._flushing = True
            try:
                self._write(at_once or self._wait.pause == 0.0)
                while self._report_change():  # which may add writes
                    self._write(with_failing=False)
            finally:
                self._flushing = False

    def _write(self, with_failing: bool) -> None:
        """Write the queues, each up to its first write that fails."""
        skipped = set() if with_failing else set(self._failing)
        while (path := next((path for path in self._queues if path not in skipped), None)) is not None:
            try:
                self._queues[path][0]()
            except OSError as error:
                if may_pass(error):
                    self._failing[path] = error
                    skipped.add(path)
                    continue
                self.refused = self.refused or FailedWrite(path, error)
            self._queues[path].popleft()
            self._failing.pop(path, None)
            if not self._queues[path]:
                del self._queues[path]
        if with_failing and self._failing:
            self._wait.fail()

    def _report_change(self) -> bool:
        """Report that a wait has begun or ended; return whether one has."""
        if self._failing and self.failed is None:
            if not self._wait.has_begun:
                self._wait.fail()
            self.failed = FailedWrite(*next(iter(self._failing.items())))
            self._begins(self.failed)
            return True
        if not self._failing and self.failed is not None:
            failed, self.failed = self.failed, None
            self._ends(failed, self._wait.succeed())
            return True
        return False
