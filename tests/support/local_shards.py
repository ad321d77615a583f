"""Shards of local checkpoints as a run leaves them on its nodes, written without a run."""

from __future__ import annotations

from pathlib import Path

import torch

from megalaunch.engine.checkpoint.local_shard import write_shard
from megalaunch.rundir.checkpoint.local_shards import LocalShard, node_folder_name, shard_directory
from megalaunch.rundir.paths import RunDirectory


def write_local_shard(place: Path, run: RunDirectory, rank: int, step: int) -> Path:
    """Write the shard of one of two ranks below `checkpoint.memory.path` or `.local.path`; return its directory."""
    folder = place / node_folder_name(run)
    tensors = {"w": torch.zeros(64)}
    shard = LocalShard(rank, step, 1, 1, 2, "layout")
    write_shard(folder, shard, tensors, {"step": step}, lambda done, total: None, lambda: None)
    return shard_directory(folder, rank, step)
