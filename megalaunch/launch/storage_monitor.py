"""Watch from the launcher whether the run directory can be written, and keep the launcher's events until it can."""

from __future__ import annotations

import contextlib
import errno
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalaunch.format.paths import display_path
from megalaunch.launch.directory import unwritable_reason
from megalaunch.launch.display.event_messages import storage_back, storage_warning
from megalaunch.launch.write_thread import STALLED_SECONDS, WriteThread
from megalaunch.rundir.events import EventName, make_event
from megalaunch.rundir.jsonl import Record, append_line
from megalaunch.rundir.outcome import Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.pending_writes import FailedWrite, PendingWrites
from megalaunch.rundir.storage_wait import LONGEST_PAUSE, StorageWait, remedy

PROBE_SECONDS = 1.0
_PROBE_BYTES = 4096  # a full file system may still accept an empty file
_SETTLE_SECONDS = 2 * LONGEST_PAUSE  # from the return of the storage to the first progress
_ENDING_SECONDS = 30.0  # from the deadline to the end of ranks that end the run themselves
_SAME_WAIT_SECONDS = 10.0  # ranks and launcher notice a failure at different moments
_PROBE_WAIT_SECONDS = 0.2  # for a probe: far more than it takes, unless the storage is slow
_STALL = OSError(errno.ETIMEDOUT, "a write does not return")
_STALL_REMEDY = "thaw it, or see whether its server answers"


class StorageMonitor:
    """The state of a run directory's storage: `poll` writes to it and to its checkpoints once a second.

    Ranks that cannot write their progress make none that the launcher sees, so its hang detection asks
    `excuses_silence`. Everything is written by threads, as storage may block in the kernel: a write that does not
    return is recorded as a wait of the storage, since the ranks that it blocks cannot tell.

    Args:
        timeout: seconds that the run waits for storage (`run.storage_timeout`).
        touch: a further write of each probe, to show that this process lives.
    """

    def __init__(self, directory: RunDirectory, timeout: float, touch: Callable[[], None] = lambda: None) -> None:
        self._directory, self._timeout, self._touch = directory, timeout, touch
        self._writes, self._checkpoint_probes, self._final_writes = WriteThread(), WriteThread(), WriteThread()
        self._failed: dict[Path, FailedWrite] = {}  # the last probe of a folder, if it failed
        self._stalled: Path | None = None  # recorded by an event
        self._wait = StorageWait(timeout)
        self._events = PendingWrites(StorageWait(timeout))
        self._next_probe, self._back_at = 0.0, float("-inf")
        self._shown: list[tuple[float, float]] = []  # waits with a line on the terminal: begin and end, since 1970
        self._shows_wait = False
        self._last_wait = 0.0  # seconds
        self._shown_path = str(directory.root)
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
        root, checkpoints = self._directory.root, self._directory.checkpoints
        if self._writes.is_idle:
            self._writes.submit(self._write_all, _PROBE_WAIT_SECONDS)
        if self._checkpoint_probes.is_idle and _is_other_storage(checkpoints, root):
            self._checkpoint_probes.submit(lambda: self._probe(checkpoints), _PROBE_WAIT_SECONDS)
        stalled = root if self._writes.is_stalled else checkpoints if self._checkpoint_probes.is_stalled else None
        failed = FailedWrite(stalled, _STALL) if stalled else self._failed.get(root)
        if failed is not None:
            self._fail(failed)
        elif self._wait.has_begun and self._writes.is_idle and self._checkpoint_probes.is_idle:
            self._succeed(now)
        self._record_stall(stalled)

    def poll_last(self, now: float) -> None:
        """Probe once more if writes failed: a run may end before the probe that would see its storage return."""
        if self._wait.has_begun:
            self._next_probe = now
            self.poll(now)

    def excuses_silence(self, now: float) -> bool:
        """Return whether ranks may be silent because of the storage: it fails, or has returned a moment ago."""
        if self._wait.has_begun:
            return self._wait.seconds < self._timeout + _ENDING_SECONDS
        return now - self._back_at < _SETTLE_SECONDS

    def record(self, event: EventName, **details: Any) -> None:
        """Append an event now, or once the storage is back."""
        record, path = make_event(event, **details), self._directory.events
        seconds = 0.0 if self._writes.is_stalled else STALLED_SECONDS
        self._writes.submit(lambda: self._events.add(path, lambda: append_line(path, record)), seconds)

    def unwritable_reason(self) -> str | None:
        """Return why a folder of the run cannot be written, or None. A write that does not return is a reason."""
        found: list[str | None] = []
        self._write(lambda: found.append(unwritable_reason(self._directory)))
        return (
            found[0]
            if found
            else f"a folder of {display_path(self._directory.root)} cannot be written: {_STALL.strerror}"
        )

    def write_outcome(self, outcome: Outcome) -> None:
        """Write the outcome, unless the storage fails or blocks: exit code and report show it all the same."""

        def write() -> None:
            with contextlib.suppress(OSError):
                write_outcome(self._directory.outcome, outcome)

        self._write(write)

    def _write(self, write: Callable[[], None]) -> None:
        """Run a write and wait for it, unless one before it has not returned yet."""
        if self._final_writes.is_idle:
            self._final_writes.submit(write, STALLED_SECONDS)

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

    def _write_all(self) -> None:
        """Write to the run directory all that is due."""
        self._probe(self._directory.root)
        self._touch()
        self._events.flush()

    def _probe(self, folder: Path) -> None:
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
        except OSError as error:
            self._failed[folder] = FailedWrite(folder, error)
        else:
            self._failed.pop(folder, None)

    def _record_stall(self, folder: Path | None) -> None:
        """Record that writes to a folder begin to stall, or return again."""
        before, reason = self._stalled, str(_STALL.strerror)
        if folder is not None and folder != before:
            self._stalled, left = folder, max(0.0, self._timeout - self._wait.seconds)
            self.record("storage_wait", path=str(folder), reason=reason, fix=_STALL_REMEDY, seconds_left=left)
        elif before is not None and not self._wait.has_begun:
            self._stalled = None
            self.record("storage_back", path=str(before), reason=reason, seconds=self._last_wait)

    def _fail(self, failed: FailedWrite) -> None:
        begins = not self._wait.has_begun
        self._wait.fail()
        if begins and not self._rank_waits and self._timeout:
            fix = _STALL_REMEDY if failed.error is _STALL else remedy(failed.error)
            reason = str(failed.error.strerror)
            self._shown_path = str(failed.path)
            self._lines.append(storage_warning(self._shown_path, reason, fix, self._timeout))
            self._shown.append((time.time(), float("inf")))
            self._shows_wait = True

    def _succeed(self, now: float) -> None:
        seconds, self._back_at = self._wait.succeed(), now
        self._last_wait = seconds
        if self._shows_wait:
            self._shows_wait = False
            self._shown[-1] = (self._shown[-1][0], time.time())
            self._lines.append(storage_back(self._shown_path, seconds))


def _is_other_storage(folder: Path, root: Path) -> bool:
    """Return whether a folder is on another file system than the run directory."""
    try:
        return folder.stat().st_dev != root.stat().st_dev
    except OSError:
        return False
