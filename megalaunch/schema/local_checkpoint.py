"""The `checkpoint.local` section: frequent checkpoints on the nodes' disks, between those in the run directory."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LocalCheckpointSpec:
    """Local checkpoints: each rank's shard on a disk of its node, and a copy on another node."""

    interval: int = setting(0, "Steps between local checkpoints; 0: none.", "steps", minimum=0)
    path: str | None = setting(
        None, "Folder on a disk that belongs to one node; environment variables are replaced on each node."
    )
    replicate: bool = setting(True, "Copy each node's shards to the next node, so that a lost node's are restored.")
    keep: int = setting(1, "Number of newest local checkpoints to retain.", minimum=1)
