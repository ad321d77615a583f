"""Local checkpoints on a node: a folder for each rank in the run's folder there, and in it a shard for each step.

A shard is a directory with the rank's tensors, `position.json`, `shard.json` and a manifest with the hash of each file.
It appears complete or not at all. Copies of other nodes' shards have the same names as the shards themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalaunch.rundir.checkpoint.listing import checkpoints_by_step
from megalaunch.rundir.paths import RunDirectory

SHARD_TENSORS = "shard.safetensors"
SHARD = "shard"  # the document that describes a shard
_RANK = "rank_"


@dataclass(frozen=True)
class LocalShard:
    """What a local checkpoint holds of one rank.

    Attributes:
        rank: The rank whose tensors it holds.
        step: The step after which it was saved.
        attempt: The start of all workers that saved it (`attempts.jsonl`).
        resumes: The number of resumes of the run when it was saved (`resumes.jsonl`).
        world: The number of ranks that saved one.
        layout: A digest of names, dtypes and slices of the tensors.
    """

    rank: int
    step: int
    attempt: int
    resumes: int
    world: int
    layout: str

    def to_document(self) -> Mapping[str, Any]:
        """Return the document of the shard."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Any) -> LocalShard:
        """Return the description in a document. Raises ValueError for one that no run wrote."""
        match document:
            case {
                "rank": int(rank),
                "step": int(step),
                "attempt": int(attempt),
                "resumes": int(resumes),
                "world": int(world),
                "layout": str(layout),
            }:
                return cls(rank, step, attempt, resumes, world, layout)
        raise ValueError("it describes no shard")


def node_folder_name(directory: RunDirectory) -> str:
    """Return the name of a run's folder on its nodes, which no other run has. Raises OSError.

    A run of the same directory, removed and begun again, is another one.
    """
    first = b""
    if directory.attempts.exists():
        with directory.attempts.open("rb") as file:
            first = file.readline()
    root = directory.root.absolute()
    return f"{root.name}-{hashlib.sha256(bytes(root) + first).hexdigest()[:12]}"


def rank_folder(folder: Path, rank: int) -> Path:
    """Return where a node's folder holds the shards of a rank."""
    return folder / f"{_RANK}{rank:05d}"


def rank_folders(folder: Path) -> list[Path]:
    """Return the folders of all ranks in a node's folder."""
    return sorted(folder.glob(f"{_RANK}*"))


def shard_directory(folder: Path, rank: int, step: int) -> Path:
    """Return where a node's folder holds the shard of a rank and a step."""
    return rank_folder(folder, rank) / f"step_{step:08d}"


def list_shards(folder: Path) -> list[LocalShard]:
    """Return the shards in a node's folder, without reading their tensors. Raises OSError.

    A shard whose description is damaged is left out: the step then lacks it.
    """
    shards = []
    for ranks in rank_folders(folder):
        for directory in checkpoints_by_step(ranks).values():
            shard = _read_shard(directory)
            if shard is not None and shard_directory(folder, shard.rank, shard.step) == directory:
                shards.append(shard)
    return shards


def _read_shard(directory: Path) -> LocalShard | None:
    try:
        return LocalShard.from_document(json.loads((directory / f"{SHARD}.json").read_text(encoding="utf-8")))
    except (ValueError, RecursionError, FileNotFoundError):
        return None


def superseded_shards(ranks: Path, keep: int) -> list[Path]:
    """Return the directories in a rank's folder that are older than the newest `keep`: saved before, or damaged."""

    def age(directory: Path) -> tuple[int, int]:
        shard = _read_shard(directory)
        return (shard.resumes, shard.step) if shard is not None else (-1, 0)

    return sorted(checkpoints_by_step(ranks).values(), key=age, reverse=True)[keep:]
