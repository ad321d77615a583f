"""The `checkpoint` section."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalaunch.schema.local_checkpoint import LocalCheckpointSpec, MemoryCheckpointSpec
from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Saving and loading checkpoints. The last step and a stop signal always save one."""

    load_pretrained: str | None = setting(
        None, "Initial weights of a new run: a Hugging Face folder, a checkpoint or a run directory."
    )
    branch_from: str | None = setting(
        None,
        "Checkpoint of another run with which a new run continues, optimizer and step included: RUN@STEP, RUN (its "
        "newest) or the checkpoint's path.",
    )
    interval: int = setting(0, "Steps between checkpoints; 0: only when the run ends or stops.", "steps", minimum=0)
    keep_last: int = setting(2, "Number of newest checkpoints to retain; 0: all.", minimum=0)
    keep_every: int = setting(
        0, "Never delete checkpoints of steps divisible by this; 0: delete any.", "steps", minimum=0
    )
    async_save: bool = setting(False, "Save asynchronously: training continues while a checkpoint is written.")
    memory: MemoryCheckpointSpec = field(default_factory=MemoryCheckpointSpec)
    local: LocalCheckpointSpec = field(default_factory=LocalCheckpointSpec)
