"""Sum the seconds that this rank's host spends in the phases of its steps, from one check of all ranks to the next.

Nothing waits for the device: where it computes on streams, these are times of the launches. Waits in collectives count
as part of the phase that has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from megalaunch.engine.parallel.step_observer import Phase, StepObserver

Measured = Literal["data", "forward_backward", "optimizer", "step"]
MEASURED: tuple[Measured, ...] = ("data", "forward_backward", "optimizer", "step")
"""Wait for the batch; forward and backward passes; reduction of gradients, norm and update; the whole step."""
_OBSERVED: dict[Phase, Measured] = {"forward": "forward_backward", "optimizer": "optimizer"}


@dataclass
class _Sum:
    seconds: float = 0.0
    count: int = 0


class PhaseClock(StepObserver):
    """Clock of one rank, as observer of its `TrainStep`; the data wait and the whole step are added by its caller."""

    def __init__(self) -> None:
        self._sums = {phase: _Sum() for phase in MEASURED}

    @contextmanager
    def phase_scope(self, phase: Phase) -> Iterator[None]:
        """Measure a phase; nothing if it raises, as a step that is refused does not count."""
        started = time.perf_counter()
        yield
        self.add(_OBSERVED[phase], time.perf_counter() - started)

    def add(self, phase: Measured, seconds: float) -> None:
        """Add the time of one step in a phase."""
        self._sums[phase].seconds += seconds
        self._sums[phase].count += 1

    def take(self) -> dict[Measured, float]:
        """Return the seconds a step in each phase since the last call."""
        means = {phase: each.seconds / max(each.count, 1) for phase, each in self._sums.items()}
        self._sums = {phase: _Sum() for phase in MEASURED}
        return means
