"""The `schedule` section: the learning rate over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """lr = min_lr + f * (optimizer.lr - min_lr), after a linear warm-up; Megatron's shapes of f."""

    shape: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = setting(
        "cosine", "How the rate falls after the warm-up."
    )
    warmup_steps: int | None = setting(
        None, "Steps from 0 to the peak rate; null: warmup_fraction of decay_steps.", "steps", minimum=0
    )
    warmup_fraction: float = setting(
        0.0, "Part of decay_steps that is the warm-up, where warmup_steps is null.", minimum=0, maximum=1
    )
    warmup_init_lr: float = setting(0.0, "Rate at which the warm-up starts.", minimum=0)
    decay_steps: int | None = setting(None, "Step at which min_lr is reached; null: train.steps.", "steps", minimum=1)
    min_lr: float = setting(0.0, "Rate at and after decay_steps.", minimum=0)
    wsd_decay_steps: int | None = setting(
        None, "Length of the final fall of the wsd shape; null: wsd_decay_fraction of decay_steps.", "steps", minimum=0
    )
    wsd_decay_fraction: float = setting(
        0.1, "Part of decay_steps that is the final fall, where wsd_decay_steps is null.", minimum=0, maximum=1
    )
    wsd_decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = setting(
        "linear", "How the wsd shape falls at its end."
    )
