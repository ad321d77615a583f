"""The folder for the local checkpoints of a run on this node, and this rank's place among the nodes."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megalaunch.engine.checkpoint.coordination import rank_and_world, run_on_all_ranks, run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.retention import remove_leftovers
from megalaunch.fs import make_directory, write_file_atomically
from megalaunch.rundir.checkpoint.local_shards import node_folder_name, rank_folder, rank_folders
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.local_checkpoint import expand_node_path

_PRIVATE = 0o700
"""Mode of the folder: weights are for the user of the run alone."""


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder, as one of its ranks sees it.

    Attributes:
        path: The folder of this run on this node.
        rank: This rank.
        world: The number of ranks.
        devices_per_node: The number of ranks of each node.
        is_private: Whether no other node sees the files in it.
    """

    path: Path
    rank: int
    world: int
    devices_per_node: int
    is_private: bool = True

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.rank // self.devices_per_node

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.world // self.devices_per_node

    @property
    def is_first_of_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.rank % self.devices_per_node == 0

    @property
    def next_rank(self) -> int:
        """The rank of the next node, of the same place there, which holds the copy of this rank's shard."""
        return (self.rank + self.devices_per_node) % self.world

    @property
    def previous_rank(self) -> int:
        """The rank of the previous node whose shard this one holds a copy of."""
        return (self.rank - self.devices_per_node) % self.world

    def remove_other_ranks(self) -> None:
        """Remove the shards of ranks that were on this node or the previous one once, and no longer are."""
        if not self.is_first_of_node or not self.is_private:
            return
        held = range(self.rank - self.devices_per_node, self.rank + self.devices_per_node)
        needed = {rank_folder(self.path, rank % self.world) for rank in held}
        for ranks in rank_folders(self.path):
            if ranks not in needed:
                shutil.rmtree(ranks)

    def remove(self) -> None:
        """Remove the folder with all local checkpoints of the run in it; raises nothing."""
        if self.is_first_of_node:
            shutil.rmtree(self.path, ignore_errors=True)


def open_node_folder(
    section: str, setting: str, directory: RunDirectory, devices_per_node: int, attempt: int
) -> NodeFolder:
    """Create this node's folder for a run, and remove what killed saves left there. Collective.

    Args:
        section: `checkpoint.memory` or `checkpoint.local`.
        setting: the `path` of that section.
        directory: The run directory.
        devices_per_node: The number of ranks of each node.
        attempt: The number of this start of all workers.

    Raises:
        CheckpointError: A node has no such folder, and cannot create it; the same on all ranks.
    """
    rank, world = rank_and_world()
    name = run_on_rank0(partial(node_folder_name, directory))
    path = run_on_all_ranks(partial(_make, section, setting, name))[rank]
    folder = NodeFolder(path, rank, world, devices_per_node)
    mark = f".attempt_{attempt}_node_"
    run_on_all_ranks(partial(_prepare, folder, mark))
    nodes = run_on_all_ranks(lambda: len(list(folder.path.glob(f"{mark}*"))))
    run_on_all_ranks(lambda: (folder.path / f"{mark}{folder.node}").unlink(missing_ok=True))
    return replace(folder, is_private=max(nodes) == 1)


def _make(section: str, setting: str, name: str) -> Path:
    """Create the folder of the run on this node, with no access for others. Raises CheckpointError."""
    path, host = expand_node_path(setting), socket.gethostname()
    if path is None:
        raise CheckpointError(
            f"{section}.path={setting} is {os.path.expandvars(setting)} on {host}: name an absolute path, with "
            "variables that every node has"
        )
    folder = path / name
    try:
        make_directory(folder)
        if folder.stat().st_uid != os.geteuid():  # any user may create files in /dev/shm
            raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
        folder.chmod(_PRIVATE)
    except OSError as error:
        raise CheckpointError(
            f"{section}.path={setting} cannot be used on {host}: {error}; name a folder that each node can write, or "
            f"set {section}.interval=0"
        ) from error
    return folder


def _prepare(folder: NodeFolder, mark: str) -> None:
    """Leave a mark that other nodes see if the folder is theirs too, and remove what killed saves left."""
    if folder.is_first_of_node:
        write_file_atomically(folder.path / f"{mark}{folder.node}", "", sync=False)
        for ranks in rank_folders(folder.path):
            remove_leftovers(ranks)
