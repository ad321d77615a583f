"""The `schedule` section: the schedules of learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Learning rate schedule: linear warmup, then lr = min_lr + f * (optimizer.lr - min_lr), f as in Megatron.

    The weight decay may have a schedule, too.
    Steps are those of batch.global_batch_size; during a batch size rampup a step counts as its share of that batch.
    """

    shape: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = setting(
        "cosine", "Shape of the decay after the warmup."
    )
    warmup_steps: int | None = setting(
        None,
        "Steps of linear warmup to the peak learning rate; null: warmup_fraction * decay_steps.",
        "steps",
        minimum=0,
    )
    warmup_fraction: float = setting(
        0.0, "Fraction of decay_steps used for warmup if warmup_steps is null.", minimum=0, maximum=1
    )
    warmup_init_lr: float = setting(0.0, "Learning rate at the start of the warmup.", minimum=0)
    decay_steps: int | None = setting(
        None,
        "Step at which the decay reaches min_lr; null: train.steps (the samples of the run / global_batch_size).",
        "steps",
        minimum=1,
    )
    min_lr: float | None = setting(
        None, "Learning rate at and after decay_steps; null: min_lr_fraction * optimizer.lr.", minimum=0
    )
    embedding_min_lr: float | None = setting(
        None, "The same of embedding and head, with optimizer.embedding_lr; null: min_lr.", minimum=0
    )
    min_lr_fraction: float = setting(
        0.0, "Fraction of optimizer.lr at and after decay_steps if min_lr is null.", minimum=0, maximum=1
    )
    wsd_decay_steps: int | None = setting(
        None, "Steps of the final decay of wsd; null: wsd_decay_fraction * decay_steps.", "steps", minimum=0
    )
    wsd_decay_fraction: float = setting(
        0.1, "Fraction of decay_steps used for the final decay of wsd if wsd_decay_steps is null.", minimum=0, maximum=1
    )
    wsd_decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = setting(
        "linear", "Shape of the final decay of wsd."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        "Growth of the weight decay from start_weight_decay to end_weight_decay; constant: optimizer.weight_decay.",
    )
    start_weight_decay: float | None = setting(None, "Weight decay before the first step, if it grows.", minimum=0)
    end_weight_decay: float | None = setting(
        None, "Weight decay at and after weight_decay_incr_steps, if it grows.", minimum=0
    )
    weight_decay_incr_steps: int | None = setting(
        None,
        "Steps in which the weight decay grows; null: train.steps (the samples of the run / global_batch_size).",
        "steps",
        minimum=1,
    )

    @property
    def weight_decay_grows(self) -> bool:
        """Whether the weight decay has a schedule, in place of optimizer.weight_decay."""
        return self.weight_decay_incr_style != "constant"
