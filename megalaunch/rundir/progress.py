"""Progress records of the ranks, readable by other processes during a run and after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
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
    """Rewrites one small file in place (about 10 microseconds), so it may be called several times per step.

    Attributes:
        listener: called with the phase of each report; must neither block nor raise. None: nobody listens.
    """

    def __init__(self, path: Path, rank: int, attempt: int) -> None:
        self._path = path
        self._descriptor = open_file(path, os.O_WRONLY | os.O_CREAT)
        self._rank, self._attempt, self._ticks = rank, attempt, 0
        self.coordinates, self.phase, self.step = "", "starting", 0
        self.listener: Callable[[str], None] | None = None

    def report(self, phase: str, step: int | None = None) -> None:
        """Report that this rank is in `phase` of `step` (None: the step is unchanged). Never raises.

        A record that cannot be written is skipped: the next one replaces it. The file is then opened again, since a
        file system that was mounted again does not know the old descriptor.
        """
        self.phase, self.step = phase, self.step if step is None else step
        self._ticks += 1
        if self.listener is not None:
            self.listener(phase)
        record = Progress(
            self._rank, os.getpid(), self._attempt, self.coordinates, phase, self.step, self._ticks, time.time()
        )
        content = json.dumps(asdict(record)).encode().ljust(_RECORD_BYTES)
        try:
            os.pwrite(self._descriptor, content, 0)
        except OSError:
            with contextlib.suppress(OSError):
                self._reopen()
                os.pwrite(self._descriptor, content, 0)

    def _reopen(self) -> None:
        descriptor = open_file(self._path, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)


def read_progress(path: Path) -> Progress | None:
    """Return the newest record of a rank, or None if there is none yet."""
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
