"""The line of a step in metrics.jsonl."""

from __future__ import annotations

import math
from dataclasses import asdict

from megalaunch.engine.train.train_step import StepResult


def step_metrics(
    step: int, result: StepResult, total_tokens: int, seconds: float, memory_bytes: int, waited: float
) -> dict[str, object]:
    """Return the metrics line of a step.

    Args:
        step: Number of the step.
        result: Loss, gradient norm, learning rate and valid tokens of the step.
        total_tokens: Valid tokens of all steps from 1 to this one.
        seconds: Duration of the step.
        memory_bytes: Peak memory of this rank.
        waited: Seconds of the step spent waiting for data.
    """
    line: dict[str, object] = {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,  # JSON has no infinity
        "learning_rate": result.learning_rate,
        "tokens": total_tokens,
        "tokens_per_second": result.tokens / seconds,
        "step_seconds": seconds,
        "data_seconds": waited,
        "memory_bytes": memory_bytes,
    }
    if result.weight_decay is not None:
        line["weight_decay"] = result.weight_decay
    if result.loss_scale is not None:
        line["loss_scale"] = result.loss_scale
    if result.loss_scale is not None or result.updates.skipped_steps:
        line["skipped_steps"] = result.updates.skipped_steps
    line.update({f"mtp_{depth}_loss": loss for depth, loss in enumerate(result.mtp_losses, start=1)})
    if result.experts is not None:
        line.update({f"moe_{name}": value for name, value in asdict(result.experts).items()})
    return line
