"""Where each rank is, readable from outside while it runs and after it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megalaunch.rundir.files import open_file

_RECORD_BYTES = 512  # fixed, so that one write replaces the whole record


@dataclass(frozen=True)
class Progress:
    """One rank's position. `ticks` grows with every report; `time` is in seconds since 1970."""

    rank: int
    pid: int
    attempt: int
    coordinates: str
    phase: str
    step: int
    ticks: int
    time: float


class ProgressWriter:
    """Rewrites one small file in place (some 10 microseconds), so it may be called several times a step."""

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self._descriptor = open_file(path, os.O_WRONLY | os.O_CREAT)
        self._rank, self._attempt, self._ticks = rank, attempt, 0
        self.coordinates, self.phase, self.step = "", "starting", 0

    def report(self, phase: str, step: int | None = None) -> None:
        """Say that this rank now does `phase` (of step `step`; None: the same step as before). Raises nothing.

        Where nothing can be written any more (read-only by now), the ranks end together on what counts.
        """
        self.phase, self.step = phase, self.step if step is None else step
        self._ticks += 1
        record = Progress(
            self._rank, os.getpid(), self._attempt, self.coordinates, phase, self.step, self._ticks, time.time()
        )
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, json.dumps(asdict(record)).encode().ljust(_RECORD_BYTES), 0)


def read_progress(path: Path) -> Progress | None:
    """The newest record of a rank, or None when there is none (yet)."""
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
