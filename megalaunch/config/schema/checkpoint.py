"""The `checkpoint` section."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """The last step, a stop and a signal always save."""

    load_pretrained: str | None = setting(
        None, "Weights that a new run begins with: a Hugging Face folder, a checkpoint or a run."
    )
    interval: int = setting(0, "Steps between checkpoints, 0: only when the run ends or stops.", "steps", minimum=0)
    keep_last: int = setting(2, "Newest checkpoints kept, 0: all.", minimum=0)
    keep_every: int = setting(0, "Checkpoints of every n-th step are kept for good; 0: none.", "steps", minimum=0)
    async_save: bool = setting(False, "Training goes on while a checkpoint is written.")
