"""The `checkpoint.memory` and `checkpoint.local` sections: frequent checkpoints on the nodes themselves.

They are saved between those in the run directory, in the memory of the nodes and on their disks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpointSpec:
    """Checkpoints in host memory: each rank's shard in the memory of its node, and a copy on another node."""

    interval: int = setting(0, "Steps between checkpoints in host memory; 0: none.", "steps", minimum=0)
    path: str = setting(
        "/dev/shm", "Folder in memory (tmpfs) of each node; environment variables are replaced on each node."
    )
    replicate: bool = setting(True, "Copy each node's shards to the next node, so that a lost node's are restored.")
    keep: int = setting(1, "Number of newest checkpoints in host memory to retain.", minimum=1)


def expand_node_path(path: str) -> Path | None:
    """Return the `path` of a section with this node's variables; None if one is unknown, or it is not absolute."""
    expanded = Path(os.path.expandvars(path)).expanduser()
    return expanded if "$" not in str(expanded) and expanded.is_absolute() else None
