"""What a tracker is to the process that feeds it."""

from __future__ import annotations

from typing import Protocol

from megalaunch.rundir.jsonl import Record


class TrackerError(Exception):
    """A failure of a tracker whose text names a fix and may be shown: it holds no key and no password."""


class Tracker(Protocol):
    """A tracker. Any method may raise any exception of its package, and is called again with the same record.

    Attributes:
        run_id: Identifies the run there; a later launch continues the same run.
    """

    run_id: str

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Log the figures of a step; `seconds` is the time since 1970."""

    def log_event(self, record: Record) -> None:
        """Log an event of events.jsonl, for trackers that show more than figures."""

    def flush(self) -> None:
        """Send what a tracker holds back."""

    def finish(self) -> None:
        """Send what is left, and end."""
