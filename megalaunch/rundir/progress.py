"""Progress records of the ranks, readable by other processes during a run and after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megalaunch.fs import open_file

_RECORD_BYTES = 512  # fixed size: one write replaces the record


@dataclass(frozen=True)
class Progress:
    """Progress of one rank. `ticks` grows with every report; `time` is in seconds since 1970."""

    rank: int
    pid: int
    attempt: int
    coordinates: str
    phase: str
    step: int
    ticks: int
    time: float


class ProgressWriter:
    """Rewrites one small file in place (about 10 microseconds), so it may be called several times per step."""

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self._descriptor = open_file(path, os.O_WRONLY | os.O_CREAT)
        self._rank, self._attempt, self._ticks = rank, attempt, 0
        self.coordinates, self.phase, self.step = "", "starting", 0

    def report(self, phase: str, step: int | None = None) -> None:
        """Report that this rank is in `phase` of `step` (None: the step is unchanged). Never raises.

        If nothing can be written any more (a file system that became read-only), the ranks end together at a write that
        matters.
        """
        self.phase, self.step = phase, self.step if step is None else step
        self._ticks += 1
        record = Progress(
            self._rank, os.getpid(), self._attempt, self.coordinates, phase, self.step, self._ticks, time.time()
        )
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, json.dumps(asdict(record)).encode().ljust(_RECORD_BYTES), 0)


def read_progress(path: Path) -> Progress | None:
    """Return the newest record of a rank, or None if there is none yet."""
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
