"""The `train.early_stopping` section: end a run whose validation loss no longer improves."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSpec:
    """Early stopping: end the run after several validations in a row without a lower loss."""

    patience: int | None = setting(
        None,
        "End the run after this many validations in a row without improvement; null: never.",
        "validations",
        minimum=1,
    )
    min_delta: float = setting(0.0, "A lower loss is an improvement only if it is lower by more than this.", minimum=0)
    metric: str = setting(
        "validation_loss", "The loss that has to improve: validation_loss, or validation_loss/NAME of a validation set."
    )
