"""Bad steps: loss spikes, and losses or gradients that are not finite. Their batches can be left out of the run.

A step is judged before its update, by numbers that are the same on all ranks and, but for rounding, under every layout.
A batch that is left out counts as a step without an update, so that the data order stays a function of the step.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Sequence
from statistics import median

from megalaunch.engine.checkpoint.coordination import run_on_rank0
from megalaunch.engine.run_end import RunEnd
from megalaunch.rundir.bad_steps import BadStepRecord, read_bad_steps, write_bad_steps
from megalaunch.rundir.fence import Fence
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.train import TrainSpec

HISTORY = 64  # losses to which a loss is compared
_FEWEST = 16  # losses before which none is judged


class BadStep(Exception):
    """A step whose update was not made, raised on every rank; `stop` is a stop signal that any rank received."""

    def __init__(self, ending: RunEnd, stop: signal.Signals | None) -> None:
        self.reason, self.details, self.stop = ending.reason, ending.details, stop
        super().__init__(ending.reason)


class LossHistory:
    """The last losses of a run, to which the next one is compared.

    Args:
        train: Whether spikes are judged, and by which factor.
    """

    def __init__(self, train: TrainSpec) -> None:
        self._factor = train.spiky_loss_factor if train.check_for_spiky_loss else None
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def describe_spike(self, loss: float) -> str | None:
        """Return how far a loss exceeds the earlier ones; None if it is no spike. Spikes are no part of the history."""
        if self._factor is None or len(self._losses) < _FEWEST:
            return None
        usual = median(self._losses)
        if loss <= self._factor * usual:
            return None
        return f"is {loss / usual:.1f} x the median of the last {len(self._losses)} losses, {usual:.4g}"

    def append(self, loss: float) -> None:
        """Add the loss of a step."""
        self._losses.append(loss)

    def restore(self, losses: Sequence[float]) -> None:
        """Replace the history by that of a run that continues at an earlier step."""
        self._losses = deque(losses, maxlen=HISTORY)


class LeftOutBatches:
    """The batches that a run leaves out: `train.iterations_to_skip`, and those of its bad steps.

    They are in `bad_steps.json`, from which a resumed run reads them: it leaves out the same.
    """

    def __init__(self, train: TrainSpec, directory: RunDirectory, fence: Fence) -> None:
        self._directory, self._fence = directory, fence
        self._named = frozenset(train.iterations_to_skip)
        self._records: list[BadStepRecord] = []

    @property
    def num_bad_steps(self) -> int:
        """Number of bad steps of the run so far."""
        return len(self._records)

    def load(self) -> None:
        """Read the bad steps of earlier launches. Collective; raises a CheckpointError on all ranks."""
        self._records = run_on_rank0(lambda: read_bad_steps(self._directory.bad_steps))

    def contains(self, step: int) -> bool:
        """Return whether the batch of a step is left out."""
        return step in self._named or any(record.first <= step <= record.step for record in self._records)

    def add(self, step: int, first: int, reason: str) -> None:
        """Leave out the batches of steps `first` to `step` from now on; `save` records it."""
        self._records.append(BadStepRecord(step, first, reason))

    def save(self) -> None:
        """Write the bad steps for later launches. Collective; raises a CheckpointError on all ranks."""

        def write() -> None:
            with self._fence.hold():
                write_bad_steps(self._directory.bad_steps, self._records)

        run_on_rank0(write)
