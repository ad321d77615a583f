"""Save and restore local checkpoints: each rank's shard on a disk of its node, with a copy on the next node.

They are saved between the checkpoints in the run directory: a failure then costs few steps, and a lost node costs no
more, as its shards are restored from the copies. A local save that fails is reported and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.distributed import ProcessGroup

from megalaunch.engine.checkpoint.coordination import gather_objects, run_on_all_ranks, run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError, StorageError
from megalaunch.engine.checkpoint.local_recovery import (
    LocalCheckpoint,
    choose_sources,
    describe_ranks,
    holder,
    newest_first,
    problem_of,
    transfers,
)
from megalaunch.engine.checkpoint.local_shard import layout_digest, load_shard, write_shard
from megalaunch.engine.checkpoint.node_folder import NodeFolder, open_node_folder
from megalaunch.engine.checkpoint.safetensors_file import MappedFile
from megalaunch.engine.checkpoint.shard_transfer import receive_shard, send_shard
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.optimizer.outer_optimizer import saved_replicas
from megalaunch.engine.train.checkpointer import (
    AsyncSaveContext,
    Checkpointer,
    read_position,
    restore_counters,
    state_tensors,
    weight_tensors,
)
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.fs import remove_directory
from megalaunch.rundir.checkpoint.contents import WEIGHTS
from megalaunch.rundir.checkpoint.local_shards import (
    SHARD_TENSORS,
    LocalShard,
    list_shards,
    rank_folder,
    shard_directory,
    superseded_shards,
)
from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.fence import Superseded
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.resumes import append_resume, read_resumes
from megalaunch.schema import RunSpec


class LocalCheckpointer:
    """The local checkpoints of one run. Every method but `is_due` is collective; without an interval none does work.

    Args:
        spec: The run spec.
        directory: The run directory.
        model: The model of this rank.
        optimizer: Its optimizer.
        record: Log writer of this rank.
        saver: The checkpoints in the run directory, whose save thread local ones share: one save at a time.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        model: ModelParts,
        optimizer: Optimizer,
        record: RunLogger,
        saver: Checkpointer,
    ) -> None:
        self._settings, self._devices_per_node = spec.checkpoint.local, int(spec.cluster.devices_per_node)
        self._directory, self._model, self._optimizer = directory, model, optimizer
        self._record, self._saver = record, saver
        self._folder: NodeFolder | None = None
        self._layout = ""
        self._resumes = 0
        self._has_failed = False  # the save before this one

    def is_due(self, step: int) -> bool:
        """Return whether a local checkpoint of a step is saved."""
        return self._settings.interval > 0 and step % self._settings.interval == 0

    def restore(self, after: int) -> TrainProgress | None:
        """Load the newest local checkpoint of a step after `after`; return the progress, or None without one.

        Each one that is newer and cannot be loaded is reported with the reason.

        Raises:
            CheckpointError: A node has no folder for them; the same on all ranks.
        """
        if not self._settings.interval:
            return None
        folder = self._open()
        held = run_on_all_ranks(lambda: list_shards(folder.path) if folder.is_first_of_node else [])
        layouts = run_on_all_ranks(lambda: self._layout)
        resumes = run_on_rank0(lambda: read_resumes(self._directory.resumes))
        for checkpoint in newest_first(held[:: folder.devices_per_node], after):
            problem = problem_of(checkpoint, layouts, resumes)
            while problem is None and self._leave_out_damaged(checkpoint, folder):
                problem = problem_of(checkpoint, layouts, resumes)
            problem = problem or self._fetch(checkpoint, folder)
            if problem is None:
                return self._load(shard_directory(folder.path, folder.rank, checkpoint.step))
            message = f"the local checkpoint of step {checkpoint.step} is not used: {problem}"
            self._record.event("note", message=message)
        return None

    def begin_at(self, step: int) -> None:
        """Record that the run continues from a step: local checkpoints of later steps are no longer of this run."""

        def append() -> int:
            path = self._directory.resumes
            if not self._settings.interval and not path.exists():
                return 0
            with self._record.fence.hold():
                append_resume(path, self._attempt, step)
            return len(read_resumes(path))

        self._resumes = run_on_rank0(append)

    def save(self, position: TrainProgress) -> None:
        """Copy the state to host memory, and write it to the disks of the nodes while training continues.

        Waits for the save in progress, if any. Raises a RunEnd on every rank if that has failed.
        """
        started = time.perf_counter()
        self._saver.wait(position)
        self._saver.write_in_background(position, started, self._write)

    def remove(self) -> None:
        """Remove the local checkpoints, after the run has saved its last one in the run directory."""
        if self._folder is not None:
            self._record.fence.check()
            self._folder.remove()

    @property
    def _attempt(self) -> int:
        return self._record.fence.number or 0

    def _open(self) -> NodeFolder:
        if self._folder is None:
            assert self._settings.path is not None, "a rule requires it"
            self._folder = open_node_folder(self._settings.path, self._directory, self._devices_per_node, self._attempt)
            self._layout = layout_digest(self._sharded_tensors())
            if not self._folder.is_private:
                message = f"several nodes share {self._folder.path}: local checkpoints are as safe as that storage"
                self._record.event("note", message=message)
        return self._folder

    def _sharded_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that define the layout: with outer steps, those outside a round."""
        outer = self._optimizer.outer
        if outer is None:
            return state_tensors(self._model, self._optimizer)
        return {**weight_tensors(self._model), **self._optimizer.states(), **outer.states()}

    def _leave_out_damaged(self, checkpoint: LocalCheckpoint, folder: NodeFolder) -> bool:
        """Verify the shards that the ranks would get; take the damaged ones off the checkpoint. False: none is."""

        def verify() -> dict[tuple[int, int], list[str]]:
            read = partial(self._record.io_progress, "checking checkpoints", checkpoint.step)
            mine = [
                (rank, node)
                for rank, node in choose_sources(checkpoint, folder.devices_per_node).items()
                if folder.rank == holder(rank, node, folder.devices_per_node)
            ]
            return {
                (rank, node): verify_checkpoint(shard_directory(folder.path, rank, checkpoint.step), read=read)
                for rank, node in mine
            }

        found = {place: problems for share in run_on_all_ranks(verify) for place, problems in share.items() if problems}
        for (rank, node), problems in found.items():
            path = shard_directory(folder.path, rank, checkpoint.step)
            reason = f"{'; '.join(problems)} (on node {node})"
            self._record.event("checkpoint_refused", path=str(path), reason=reason)
            checkpoint.leave_out(rank, node)
        return bool(found)

    def _fetch(self, checkpoint: LocalCheckpoint, folder: NodeFolder) -> str | None:
        """Copy shards to the nodes that lack them; return what failed, the same on all ranks."""
        moves = transfers(choose_sources(checkpoint, folder.devices_per_node), folder.devices_per_node)
        problem = None
        for rank, sender in moves:
            directory = shard_directory(folder.path, rank, checkpoint.step)
            if folder.rank == sender:
                send_shard(directory, rank, self._saver.group)
            elif folder.rank == rank:
                wrote = partial(self._record.io_progress, "loading", checkpoint.step)
                problem = _problem_in(partial(receive_shard, directory, sender, self._saver.group, wrote))
        problem = _first_problem(problem, self._saver.group)
        if moves and problem is None:
            ranks = describe_ranks([rank for rank, _ in moves])
            message = f"restored from other nodes: the local shards of {ranks}"
            self._record.event("note", message=message)
        return problem

    def _load(self, directory: Path) -> TrainProgress:
        """Load this rank's shard. Raises CheckpointError on all ranks if it does not fit on any."""

        def load() -> TrainProgress:
            if self._optimizer.outer is not None:
                names = MappedFile(directory / SHARD_TENSORS).entries
                _, self._optimizer.outer.in_round = saved_replicas(names, WEIGHTS)
            load_shard(directory, state_tensors(self._model, self._optimizer))
            return read_position(directory)

        self._record.phase("loading")
        position = run_on_all_ranks(load)[0]
        restore_counters(position, self._model, self._optimizer)
        self._record.event("resumed", step=position.step, checkpoint=str(directory.parent.parent))
        return position

    def _write(
        self,
        position: TrainProgress,
        tensors: Mapping[str, Tensor],
        started: float,
        async_context: AsyncSaveContext,
        waited: float,
    ) -> None:
        """Write this rank's shard and send a copy of it to the next node. Runs on the save thread."""
        folder, group = self._open(), async_context.group
        values = {name: async_context.copies[name] for name in tensors}
        step = position.step
        problem = _first_problem(_problem_in(partial(self._write_shard, position, values)), group)
        if problem is not None:
            self._record.fence.check()  # a later attempt is a reason to end
            self._report(f"the local checkpoint of step {step} was not saved: {problem}; training continues")
            return
        copies = self._settings.replicate and folder.nodes > 1 and folder.is_private
        if copies:
            problem = _first_problem(_problem_in(partial(self._copy, step, group)), group)
        failure = problem and f"the local checkpoint of step {step} has no copy of a shard: {problem}"
        self._report(failure or self._remove_old(folder))
        seconds = time.perf_counter() - started
        self._record.event(
            "local_checkpoint",
            step=step,
            path=str(folder.path),
            seconds=seconds,
            waited_seconds=waited,
            copied=copies and problem is None,
        )

    def _write_shard(self, position: TrainProgress, values: Mapping[str, Tensor]) -> None:
        """Write this rank's shard. A resume keeps the metrics up to its step, so they are synced to disk before."""
        folder, step = self._open(), position.step
        if self._record.is_first:
            self._record.sync_metrics()
        shard = LocalShard(folder.rank, step, self._attempt, self._resumes, folder.world, self._layout)
        wrote = partial(self._saver.report_progress, step)
        write_shard(folder.path, shard, values, position.to_document(), wrote, self._record.fence.check)

    def _copy(self, step: int, group: ProcessGroup | None) -> None:
        """Send this rank's shard to the next node, and write that of the previous node: a ring of the nodes."""
        folder, fence = self._open(), self._record.fence
        mine, theirs = (shard_directory(folder.path, rank, step) for rank in (folder.rank, folder.previous_rank))
        wrote = partial(self._saver.report_progress, step)
        sends_first = folder.node % 2 == 0  # if every node did, each would wait for the next one to receive
        if sends_first:
            send_shard(mine, folder.next_rank, group)
        try:
            receive_shard(theirs, folder.previous_rank, group, wrote, fence.check)
        finally:
            if not sends_first:
                send_shard(mine, folder.next_rank, group)

    def _remove_old(self, folder: NodeFolder) -> str | None:
        """Remove what newer local checkpoints replace, and shards of ranks that have moved; return what failed."""
        self._record.fence.check()
        try:
            for rank in {folder.rank, folder.previous_rank}:
                for directory in superseded_shards(rank_folder(folder.path, rank), self._settings.keep):
                    remove_directory(directory)
            folder.remove_other_ranks()
        except OSError as error:
            return f"old local checkpoints could not be removed: {error}"
        return None

    def _report(self, failure: str | None) -> None:
        """Report a failure, unless the save before has failed too."""
        if failure is not None and not self._has_failed:
            self._record.event("note", message=failure)
        self._has_failed = failure is not None


def _problem_in(work: Callable[[], None]) -> str | None:
    """Return why work of this rank failed; None if it has not."""
    try:
        work()
    except StorageError as error:
        return f"{error.path}: {error.reason}"
    except (CheckpointError, Superseded) as error:
        return str(error)
    return None


def _first_problem(mine: str | None, group: ProcessGroup | None) -> str | None:
    """Return the problem of the lowest rank that has one, the same on all ranks. Collective."""
    problems = enumerate(gather_objects(mine, group))
    return next((f"rank {rank}: {problem}" for rank, problem in problems if problem is not None), None)
