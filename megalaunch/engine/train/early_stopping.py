"""Early stopping: end a run after several validations in a row without a lower loss (`train.early_stopping`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megalaunch.schema.early_stopping import EarlyStoppingSpec


@dataclass(frozen=True)
class EarlyStoppingState:
    """What a checkpoint holds of early stopping, so that a resumed run ends at the same step.

    Attributes:
        metric: The loss that is watched.
        best: The lowest loss so far that was an improvement; None before the first validation.
        best_step: Its step.
        num_bad: Validations in a row since then without improvement.
        step: Step of the last validation that was counted: a repeated one does not count again.
    """

    metric: str
    best: float | None = None
    best_step: int = 0
    num_bad: int = 0
    step: int = 0

    @classmethod
    def from_document(cls, document: Any) -> EarlyStoppingState:
        """Return the state in a checkpoint's document. Raises ValueError if it holds none."""
        match document:
            case {"metric": str(), "best": float() | None, "best_step": int(), "num_bad": int(), "step": int()}:
                return cls(**{name: document[name] for name in ("metric", "best", "best_step", "num_bad", "step")})
        raise ValueError("no valid state of early stopping")

    def update(self, step: int, loss: float, min_delta: float) -> EarlyStoppingState:
        """Count a validation; a loss that is not a number is no improvement."""
        if step <= self.step:
            return self
        if loss == loss and (self.best is None or loss < self.best - min_delta):
            return replace(self, best=loss, best_step=step, num_bad=0, step=step)
        return replace(self, num_bad=self.num_bad + 1, step=step)


def count_validation(
    state: EarlyStoppingState | None, spec: EarlyStoppingSpec, step: int, losses: Mapping[str, float]
) -> EarlyStoppingState | None:
    """Return the state after a validation; None where early stopping is off, or the validation lacks its metric.

    Args:
        state: The state before; another metric's is dropped.
        spec: The settings.
        step: Step of the validation.
        losses: Its losses, by their keys in metrics.jsonl.
    """
    if spec.patience is None or spec.metric not in losses:
        return state
    if state is None or state.metric != spec.metric:
        state = EarlyStoppingState(spec.metric)
    return state.update(step, losses[spec.metric], spec.min_delta)


def is_stopped(state: EarlyStoppingState | None, spec: EarlyStoppingSpec) -> bool:
    """Return whether the run has to end."""
    if state is None or spec.patience is None or state.metric != spec.metric:
        return False
    return state.num_bad >= spec.patience


def stop_reason(state: EarlyStoppingState, spec: EarlyStoppingSpec, step: int, steps: int) -> str:
    """Return the reason of the end, for the outcome."""
    by = f" by more than {spec.min_delta:g}" if spec.min_delta else ""
    best = f"; the best is {state.best:.4f} of step {state.best_step}" if state.best is not None else ""
    times = f"{state.num_bad} validation{'s' if state.num_bad > 1 else ''}"
    return f"stopped early after step {step} of {steps}: {state.metric} has not improved{by} for {times}{best}"
