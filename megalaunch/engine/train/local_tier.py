"""One tier of local checkpoints: each rank's shard in a folder of its node, in memory or on a disk, and its copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from megalaunch.engine.checkpoint.coordination import gather_objects
from megalaunch.engine.checkpoint.errors import CheckpointError, StorageError
from megalaunch.engine.checkpoint.local_shard import write_shard
from megalaunch.engine.checkpoint.node_folder import NodeFolder, open_node_folder
from megalaunch.engine.checkpoint.shard_transfer import copy_shard, receive_shard, send_shard
from megalaunch.engine.train.background_save import BackgroundSave
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.fs import remove_directory
from megalaunch.rundir.checkpoint.local_shards import LocalShard, rank_folder, shard_directory, superseded_shards
from megalaunch.rundir.fence import Superseded
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec


@dataclass(frozen=True)
class TierSettings:
    """The settings of one tier.

    Attributes:
        section: `memory` or `local`: the section of `checkpoint`, and its name in the events.
        interval: Steps between its checkpoints; 0: none.
        path: The folder of each node in which the run's folder is.
        replicate: Whether each node's shards are copied to the next node.
        keep: Number of newest checkpoints to retain.
    """

    section: Literal["memory", "local"]
    interval: int
    path: str | None
    replicate: bool
    keep: int

    @classmethod
    def memory(cls, spec: RunSpec) -> TierSettings:
        """Return those of the checkpoints in host memory."""
        memory = spec.checkpoint.memory
        return cls("memory", memory.interval, memory.path, memory.replicate, memory.keep)

    @classmethod
    def disk(cls, spec: RunSpec) -> TierSettings:
        """Return those of the checkpoints on the nodes' disks."""
        local = spec.checkpoint.local
        return cls("local", local.interval, local.path, local.replicate, local.keep)


@dataclass
class PendingDrain:
    """A checkpoint that is to be copied to another tier, and is retained until then.

    Attributes:
        step: Its step.
        is_complete: Whether all ranks have it; False before it is written, and if that failed.
        has_copies: Whether each shard has a copy on another node.
    """

    step: int
    is_complete: bool = False
    has_copies: bool = False


class LocalTier:
    """The local checkpoints of one run in the memory of its nodes, or on their disks.

    Args:
        settings: Its settings.
        devices_per_node: The number of ranks of each node.
        directory: The run directory.
        record: Log writer of this rank.
        background: The thread that saves them.

    Attributes:
        drain: The checkpoint that is to be copied to another tier; None: none.
    """

    def __init__(
        self,
        settings: TierSettings,
        devices_per_node: int,
        directory: RunDirectory,
        record: RunLogger,
        background: BackgroundSave,
    ) -> None:
        self._settings, self._devices_per_node = settings, devices_per_node
        self._directory, self._record, self.background = directory, record, background
        self._folder: NodeFolder | None = None
        self._has_failed = False  # the save before this one
        self.drain: PendingDrain | None = None

    @property
    def description(self) -> str:
        """What a checkpoint of this tier is called in messages."""
        return "checkpoint in memory" if self._settings.section == "memory" else "local checkpoint"

    @property
    def is_used(self) -> bool:
        """Whether the run saves any in this tier."""
        return self._settings.interval > 0

    def is_due(self, step: int) -> bool:
        """Return whether one of a step is saved."""
        return self.is_used and step % self._settings.interval == 0

    @property
    def folder(self) -> NodeFolder:
        """The folder of this node. Collective at the first use; raises CheckpointError on all ranks."""
        if self._folder is None:
            path, attempt = self._settings.path, self._record.fence.number or 0
            assert path is not None, "a rule requires it"
            section = f"checkpoint.{self._settings.section}"
            self._folder = open_node_folder(section, path, self._directory, self._devices_per_node, attempt)
            if not self._folder.is_private:
                message = f"several nodes share {self._folder.path}: checkpoints there are as safe as that storage"
                self._record.event("note", message=message)
        return self._folder

    def write(self, shard: LocalShard, values: Mapping[str, Tensor], position: TrainProgress) -> bool:
        """Write the shards of all ranks; return whether that succeeded. Collective.

        A resume keeps the metrics up to its step, so they are synced to disk before.
        """

        def write() -> None:
            if self._record.is_first:
                self._record.sync_metrics()
            wrote = partial(self.background.report_progress, shard.step)
            write_shard(self.folder.path, shard, values, position.to_document(), wrote, self._record.fence.check)

        return self._has_succeeded(shard.step, write)

    def drain_from(self, source: LocalTier, step: int) -> bool:
        """Copy the shards of all ranks from another tier on their nodes; return whether that succeeded. Collective."""
        return self._has_succeeded(step, partial(self._copy_from, source, step, self.folder.rank))

    def replicate(self, step: int, source: LocalTier | None = None) -> bool:
        """Copy each node's shards to the next node; return whether each shard has a copy. Collective.

        Args:
            step: Its step.
            source: A tier that has the copies on their nodes already; None: none.
        """
        folder = self.folder
        if not self._settings.replicate or folder.nodes < 2 or not folder.is_private:
            self._report(None)
            return False
        copy = partial(self._exchange, step)
        if source is not None:
            copy = partial(self._copy_from, source, step, folder.previous_rank)
        problem = first_problem(problem_in(copy), self.background)
        self._report(problem and f"the {self.description} of step {step} has no copy of a shard: {problem}")
        return problem is None

    def publish(self, step: int, has_copies: bool, seconds: float, waited: float) -> None:
        """Record that a checkpoint is complete, and remove what it replaces."""
        drain = self.drain  # read once: the thread that copies it sets None
        if drain is not None and drain.step == step:
            drain.is_complete, drain.has_copies = True, has_copies
        failure = self._remove_old()
        if failure is not None:
            self._report(failure)
        self._record.event(
            "local_checkpoint",
            step=step,
            tier=self._settings.section,
            path=str(self.folder.path),
            seconds=seconds,
            waited_seconds=waited,
            copied=has_copies,
        )

    def remove(self) -> None:
        """Remove all of the run's on this node, after it has saved its last checkpoint in the run directory."""
        if self._folder is not None:
            self._record.fence.check()
            self._folder.remove()

    def _has_succeeded(self, step: int, write: Callable[[], None]) -> bool:
        problem = first_problem(problem_in(write), self.background)
        if problem is not None:
            self._record.fence.check()  # a later attempt is a reason to end
            self._report(f"the {self.description} of step {step} was not saved: {problem}; training continues")
        return problem is None

    def _copy_from(self, source: LocalTier, step: int, rank: int) -> None:
        """Copy the shard of a rank from another tier on this node."""
        held, copy = (shard_directory(tier.folder.path, rank, step) for tier in (source, self))
        copy_shard(held, copy, partial(self.background.report_progress, step), self._record.fence.check)

    def _exchange(self, step: int) -> None:
        """Send this rank's shard to the next node, and write that of the previous node: a ring of the nodes."""
        folder, group = self.folder, self.background.group
        mine, theirs = (shard_directory(folder.path, rank, step) for rank in (folder.rank, folder.previous_rank))
        wrote = partial(self.background.report_progress, step)
        sends_first = folder.node % 2 == 0  # if every node did, each would wait for the next one to receive
        if sends_first:
            send_shard(mine, folder.next_rank, group)
        try:
            receive_shard(theirs, folder.previous_rank, group, wrote, self._record.fence.check)
        finally:
            if not sends_first:
                send_shard(mine, folder.next_rank, group)

    def _remove_old(self) -> str | None:
        """Remove what newer local checkpoints replace, and shards of ranks that have moved; return what failed."""
        self._record.fence.check()
        folder = self.folder
        try:
            for rank in {folder.rank, folder.previous_rank}:
                for directory in self._superseded(rank):
                    remove_directory(directory)
            folder.remove_other_ranks()
        except OSError as error:
            return f"old local checkpoints could not be removed: {error}"
        return None

    def _superseded(self, rank: int) -> list[Path]:
        """Return the shards of a rank that are replaced, without one that is being copied to another tier."""
        old = superseded_shards(rank_folder(self.folder.path, rank), self._settings.keep)
        drain = self.drain  # read once, as in `publish`
        kept = None if drain is None else shard_directory(self.folder.path, rank, drain.step)
        return [directory for directory in old if directory != kept]

    def _report(self, failure: str | None) -> None:
        """Report a failure, unless the save before has failed too."""
        if failure is not None and not self._has_failed:
            self._record.event("note", message=failure)
        self._has_failed = failure is not None


def problem_in(work: Callable[[], None]) -> str | None:
    """Return why work of this rank failed; None if it has not."""
    try:
        work()
    except StorageError as error:
        return f"{error.path}: {error.reason}"
    except (CheckpointError, Superseded) as error:
        return str(error)
    return None


def first_problem(mine: str | None, background: BackgroundSave) -> str | None:
    """Return the problem of the lowest rank that has one, the same on all ranks. Collective."""
    problems = enumerate(gather_objects(mine, background.group))
    return next((f"rank {rank}: {problem}" for rank, problem in problems if problem is not None), None)
