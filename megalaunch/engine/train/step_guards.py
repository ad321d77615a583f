"""Guards that watch the results of steps for a model that no longer learns as it should."""

from __future__ import annotations

from collections.abc import Sequence

from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.train_step import StepResult
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import RunSpec


class ZeroGradientGuard:
    """Counter of consecutive steps with a gradient norm of exactly 0, the same on every rank.

    A step in which no label has a loss has no gradient anyway: it is ignored, and does not reset the count.

    Args:
        limit: Number of such steps that end the run; 0: never.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._consecutive = limit, 0

    @property
    def is_exceeded(self) -> bool:
        """True while the count is above 0: a save could replace a checkpoint from before the model stopped learning."""
        return self._limit > 0 and self._consecutive > 0

    def update(self, step: int, result: StepResult, record: RunLogger) -> None:
        """Count one step. Log an event at the first zero; raise the same RunEnd on every rank at the limit."""
        if result.tokens == 0:
            return
        self._consecutive = self._consecutive + 1 if result.grad_norm == 0.0 else 0
        if self._consecutive == 1:
            record.event("zero_gradient", step=step, limit=self._limit)
        if self._consecutive == self._limit > 0:
            reason = (
                f"the gradient norm is exactly 0 since step {step - self._consecutive + 1}, for "
                f"{self._consecutive} steps in a row: "
                "the model no longer learns, as after a step that was far too large"
            )
            details = {"loss": result.loss, "grad_norm": 0.0, "zero_gradient_steps": self._consecutive}
            raise RunEnd(ExitCode.NON_FINITE, reason, step, details)


class ExpertCollapseGuard:
    """Counter of consecutive steps in which one expert of a layer gets most tokens, the same on every rank.

    Logs an event per layer when the count reaches `train.expert_collapse_steps`. The run continues: balancing may win.

    Args:
        spec: The run spec.
        layers: Numbers of the layers with experts.
    """

    def __init__(self, spec: RunSpec, layers: Sequence[int]) -> None:
        self._share, self._steps = spec.train.expert_collapse_share, spec.train.expert_collapse_steps
        self._even_share = spec.model.moe.top_k / (spec.model.moe.num_experts or 1)
        self._layers, self._consecutive = layers, [0] * len(layers)

    def update(self, step: int, result: StepResult, record: RunLogger) -> None:
        """Count one step. Log an event for each layer whose count reaches the limit."""
        if result.experts is None or not self._even_share < self._share:
            return
        for index, load_max in enumerate(result.experts.load_max):
            share = load_max * self._even_share
            self._consecutive[index] = self._consecutive[index] + 1 if share > self._share else 0
            if self._consecutive[index] == self._steps:
                record.event("expert_collapse", step=step, layer=self._layers[index], share=share, steps=self._steps)
