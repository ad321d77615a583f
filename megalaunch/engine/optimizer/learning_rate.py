"""The learning rate of each update."""

from __future__ import annotations

import math
from dataclasses import replace

from megalaunch.schema.schedule import ScheduleSpec


def learning_rate(schedule: ScheduleSpec, peak: float, step: float) -> float:
    """Return the learning rate of one update.

    Linear warmup from `schedule.warmup_init_lr` to `peak`, then the schedule's shape down to `schedule.min_lr`.
    Formulas: Megatron-LM's optimizer_param_scheduler, with t = step.

    Args:
        schedule: The schedule; `decay_steps` must be resolved.
        peak: The learning rate after warmup.
        step: Number of the update, from 1; during a batch size rampup `plan.batch.schedule_position` of the update.

    Raises:
        ValueError: `schedule.decay_steps` is null.
    """
    horizon, warmup, floor = schedule.decay_steps, schedule.warmup_steps or 0, schedule.min_lr or 0.0
    if horizon is None:
        raise ValueError("schedule.decay_steps is still null: the launcher resolves it before workers start")
    if warmup > 0 and step <= warmup:
        return schedule.warmup_init_lr + (peak - schedule.warmup_init_lr) * step / warmup
    if schedule.shape == "constant":
        return peak
    if step > horizon:
        return floor
    if schedule.shape == "inverse_square_root":
        return max(floor, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1)))
    if schedule.shape == "wsd":
        return floor + _wsd_decay_factor(schedule, horizon, step) * (peak - floor)
    progress = (step - warmup) / (horizon - warmup)
    share = 1 - progress if schedule.shape == "linear" else (math.cos(math.pi * progress) + 1) / 2
    return floor + share * (peak - floor)


def embedding_learning_rate(schedule: ScheduleSpec, peak: float | None, step: float) -> float | None:
    """Return the learning rate of embedding and head, down to `schedule.embedding_min_lr`; None without a `peak`.

    As of Megatron-LM's --decoupled-lr and --decoupled-min-lr; for the arguments see `learning_rate`.
    """
    if peak is None:
        return None
    lowest = schedule.min_lr if schedule.embedding_min_lr is None else schedule.embedding_min_lr
    return learning_rate(replace(schedule, min_lr=lowest), peak, step)


def _wsd_decay_factor(schedule: ScheduleSpec, horizon: int, step: float) -> float:
    """Return the factor of the warmup-stable-decay schedule: 1 in the stable phase, then down to 0."""
    length = schedule.wsd_decay_steps or 0
    start = horizon - length
    if step <= start:
        return 1.0
    progress = (step - start) / length
    if schedule.wsd_decay_shape == "linear":
        return 1 - progress
    if schedule.wsd_decay_shape == "cosine":
        return (math.cos(math.pi * progress) + 1) / 2
    if schedule.wsd_decay_shape == "exponential":
        return 2 * 0.5**progress - 1
    return 1 - math.sqrt(progress)
