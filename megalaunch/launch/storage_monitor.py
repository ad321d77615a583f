"""Watch from the launcher whether the run directory can be written, and keep the launcher's events until it can."""

from __future__ import annotations

import tempfile
import time
from typing import Any

from megalaunch.launch.display.event_messages import storage_back, storage_warning
from megalaunch.rundir.events import EventName, make_event
from megalaunch.rundir.jsonl import Record, append_line
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.pending_writes import FailedWrite, PendingWrites
from megalaunch.rundir.storage_wait import LONGEST_PAUSE, StorageWait, remedy

PROBE_SECONDS = 1.0
_PROBE_BYTES = 4096  # a full file system may still accept an empty file
_SETTLE_SECONDS = 2 * LONGEST_PAUSE  # from the return of the storage to the first progress
_ENDING_SECONDS = 30.0  # from the deadline to the end of ranks that end the run themselves
_SAME_WAIT_SECONDS = 10.0  # ranks and launcher notice a failure at different moments


class StorageMonitor:
    """The state of a run directory's storage: `poll` writes to it once a second.

    Ranks that cannot write their progress make none that the launcher sees, so its hang detection asks
    `excuses_silence`.
    """

    def __init__(self, directory: RunDirectory, timeout: float) -> None:
        self._directory, self._timeout = directory, timeout
        self._wait = StorageWait(timeout)
        self._events = PendingWrites(StorageWait(timeout))
        self._next_probe, self._back_at = 0.0, float("-inf")
        self._shown: list[tuple[float, float]] = []  # waits with a line on the terminal: begin and end, since 1970
        self._shows_wait = False
        self._rank_waits: set[str] = set()  # what ranks wait for
        self._lines: list[str] = []

    @property
    def is_failing(self) -> bool:
        """True from a failed write of this process to the next that succeeds."""
        return self._wait.has_begun

    @property
    def seconds(self) -> float:
        """Seconds since writes began to fail; 0 while they succeed."""
        return self._wait.seconds

    def poll(self, now: float) -> None:
        """Write a probe if one is due, and the events that wait; `now` is of `time.monotonic`."""
        if now < self._next_probe:
            return
        self._next_probe = now + PROBE_SECONDS
        failed = self._probe()
        if failed is not None:
            self._fail(failed)
        elif self._wait.has_begun:
            self._succeed(now)
        self._events.flush()

    def excuses_silence(self, now: float) -> bool:
        """Return whether ranks may be silent because of the storage: it fails, or has returned a moment ago."""
        if self._wait.has_begun:
            return self._wait.seconds < self._timeout + _ENDING_SECONDS
        return now - self._back_at < _SETTLE_SECONDS

    def record(self, event: EventName, **details: Any) -> None:
        """Append an event now, or once the storage is back."""
        record = make_event(event, **details)
        self._events.add(self._directory.events, lambda: append_line(self._directory.events, record))

    def take_lines(self) -> list[str]:
        """Return the lines for the terminal since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def without_known_waits(self, events: list[Record]) -> list[Record]:
        """Return new events of the run without those of waits that `take_lines` tells."""
        for event in events:
            if event.get("event") == "storage_wait":
                self._rank_waits.add(str(event.get("path")))
            elif event.get("event") == "storage_back":
                self._rank_waits.discard(str(event.get("path")))
        return [event for event in events if not self._is_known_wait(event)]

    def _is_known_wait(self, event: Record) -> bool:
        if event.get("event") not in ("storage_wait", "storage_back"):
            return False
        end, seconds = event.get("time"), event.get("seconds", 0.0)
        if not isinstance(end, (int, float)) or not isinstance(seconds, (int, float)):
            return False
        return any(
            end - seconds - _SAME_WAIT_SECONDS < last and first < end + _SAME_WAIT_SECONDS
            for first, last in self._shown
        )

    def _probe(self) -> FailedWrite | None:
        try:
            with tempfile.TemporaryFile(dir=self._directory.root, buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
        except OSError as error:
            return FailedWrite(self._directory.root, error)
        return None

    def _fail(self, failed: FailedWrite) -> None:
        begins = not self._wait.has_begun
        self._wait.fail()
        if begins and not self._rank_waits and self._timeout:
            reason, fix = str(failed.error.strerror), remedy(failed.error)
            self._lines.append(storage_warning(str(failed.path), reason, fix, self._timeout))
            self._shown.append((time.time(), float("inf")))
            self._shows_wait = True

    def _succeed(self, now: float) -> None:
        seconds, self._back_at = self._wait.succeed(), now
        if self._shows_wait:
            self._shows_wait = False
            self._shown[-1] = (self._shown[-1][0], time.time())
            self._lines.append(storage_back(str(self._directory.root), seconds))
