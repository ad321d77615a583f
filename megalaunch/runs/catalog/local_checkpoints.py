"""The checkpoints that a run has in the memory and on the disk of this machine (`checkpoint.memory`, `.local`).

Those of its other nodes are seen by the same command there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalaunch.rundir.checkpoint.listing import directory_size
from megalaunch.rundir.checkpoint.local_shards import list_shards, node_folder_name, shard_directory
from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.local_checkpoint import expand_node_path

_PLACES = {"memory": "in memory", "disk": "on disk"}


@dataclass(frozen=True)
class LocalCheckpointInfo:
    """A node's part of a checkpoint, in the memory or on the disk of this machine.

    Attributes:
        step: The step after which it was saved.
        node: The node whose ranks saved it; a machine has copies of another node's too.
        tier: `memory` or `disk`.
        folder: The run's folder on this machine.
        size: Bytes.
        saved: Time of the newest shard, in seconds since 1970.
        problem: Why it cannot be used; None if the shards of all ranks of the node are complete.
    """

    step: int
    node: int
    tier: str
    folder: Path
    size: int
    saved: float
    problem: str | None

    @property
    def place(self) -> str:
        """Where it is, as text."""
        return _PLACES[self.tier]


def local_folders(run: RunDirectory, spec: RunSpec) -> Iterator[tuple[str, Path]]:
    """Yield the run's folders on this machine that exist, each with its tier. Raises OSError."""
    settings = spec.checkpoint
    for tier, path in (("memory", settings.memory.path), ("disk", settings.local.path)):
        place = expand_node_path(path) if path is not None else None
        if place is not None and (folder := place / node_folder_name(run)).is_dir():
            yield tier, folder


def local_checkpoints(run: RunDirectory, spec: RunSpec) -> list[LocalCheckpointInfo]:
    """Return what this machine has of a run, the newest step first, without reading tensors. Raises OSError."""
    found = [one for tier, folder in local_folders(run, spec) for one in _in_folder(tier, folder, spec)]
    return sorted(found, key=lambda one: (-one.step, one.node))


def _in_folder(tier: str, folder: Path, spec: RunSpec) -> Iterator[LocalCheckpointInfo]:
    per_node = int(spec.cluster.devices_per_node)
    parts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for shard in list_shards(folder):
        parts[shard.step, shard.rank // per_node].append(shard.rank)
    for (step, node), ranks in parts.items():
        directories = [shard_directory(folder, rank, step) for rank in ranks]
        try:
            problems = [problem for path in directories for problem in verify_checkpoint(path, hashes=False)]
            size, saved = sum(map(directory_size, directories)), max(path.stat().st_mtime for path in directories)
        except FileNotFoundError:  # a running run has just replaced it
            continue
        if missing := per_node - len(ranks):
            problems.append(f"{missing} of {per_node} ranks missing")
        yield LocalCheckpointInfo(step, node, tier, folder, size, saved, problems[0] if problems else None)
