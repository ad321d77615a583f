"""A gradient norm of exactly 0: the model has stopped learning, without a number that is not finite."""

from __future__ import annotations

from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.train_step import StepResult
from megalaunch.rundir.outcome import ExitCode


class ZeroGradientGuard:
    """Counts the steps in a row whose gradient norm is exactly 0; told of every step on all ranks alike.

    A step without a label that has a loss has no gradient to begin with: it neither counts nor ends the row.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._row = limit, 0

    @property
    def is_exceeded(self) -> bool:
        """Whether the run may end for them soon: what it has learned must not be replaced by what is saved now."""
        return self._limit > 0 and self._row > 0

    def update(self, step: int, result: StepResult, record: RunLogger) -> None:
        """Warn at the first of a row; raise a RunEnd, the same on every rank, at the last that is allowed."""
        if result.tokens == 0:
            return
        self._row = self._row + 1 if result.grad_norm == 0.0 else 0
        if self._row == 1:
            record.event("zero_gradient", step=step, limit=self._limit)
        if self._row == self._limit > 0:
            reason = (
                f"the gradient norm is exactly 0 since step {step - self._row + 1}, for {self._row} steps in a row: "
                "the model no longer learns, as after a step that was far too large"
            )
            details = {"loss": result.loss, "grad_norm": 0.0, "zero_gradient_steps": self._row}
            raise RunEnd(ExitCode.NON_FINITE, reason, step, details)
