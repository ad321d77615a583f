"""End a run whose gradient norm is exactly 0: the model has stopped learning, though every number is finite."""

from __future__ import annotations

from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.train_step import StepResult
from megalaunch.rundir.outcome import ExitCode


class ZeroGradientGuard:
    """Counter of consecutive steps with a gradient norm of exactly 0, the same on every rank.

    A step in which no label has a loss has no gradient anyway: it is ignored, and does not reset the count.

    Args:
        limit: Number of such steps that end the run; 0: never.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._row = limit, 0

    @property
    def is_exceeded(self) -> bool:
        """True while the count is above 0: a save could replace a checkpoint from before the model stopped learning."""
        return self._limit > 0 and self._row > 0

    def update(self, step: int, result: StepResult, record: RunLogger) -> None:
        """Count one step. Log an event at the first zero; raise the same RunEnd on every rank at the limit."""
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
