"""The weight decay of each update."""

from __future__ import annotations

import math

from megalaunch.schema.schedule import ScheduleSpec


def weight_decay(schedule: ScheduleSpec, constant: float, step: float) -> float:
    """Return the weight decay of one update.

    It grows from `schedule.start_weight_decay` to `schedule.end_weight_decay`. Formulas: Megatron-LM's
    optimizer_param_scheduler, with t = step.

    Args:
        schedule: The schedule; its steps and both ends must be set if it grows.
        constant: The weight decay if it does not grow (`optimizer.weight_decay`).
        step: Number of the update, from 1; during a batch size rampup `plan.batch.schedule_position` of the update.

    Raises:
        ValueError: It grows, and its steps or an end are null.
    """
    if not schedule.weight_decay_grows:
        return constant
    steps, start, end = schedule.weight_decay_incr_steps, schedule.start_weight_decay, schedule.end_weight_decay
    if steps is None or start is None or end is None:
        raise ValueError(
            f"schedule.weight_decay_incr_style={schedule.weight_decay_incr_style} needs start_weight_decay, "
            "end_weight_decay and schedule.weight_decay_incr_steps (which the launcher resolves before workers start)"
        )
    if step > steps:
        return end
    share = step / steps
    if schedule.weight_decay_incr_style == "cosine":
        share = (math.cos(math.pi * (1 - share)) + 1) / 2
    return start + share * (end - start)
