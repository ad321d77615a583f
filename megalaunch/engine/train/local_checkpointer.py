"""Save and restore local checkpoints: each rank's shard in the memory or on a disk of its node, and a copy on another.

They are saved between the checkpoints in the run directory: a failure then costs few steps, and a lost node costs no
more, as its shards are restored from the copies. There are two tiers, each with its interval: the memory of the nodes,
and their disks, to which checkpoints in memory are copied in the background. A local save that fails is reported and
ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from megalaunch.engine.checkpoint.async_save import SaveThread
from megalaunch.engine.checkpoint.coordination import run_on_all_ranks, run_on_rank0
from megalaunch.engine.checkpoint.local_recovery import (
    LocalCheckpoint,
    choose_sources,
    describe_ranks,
    holder,
    newest_first,
    problem_of,
    transfers,
)
from megalaunch.engine.checkpoint.local_shard import layout_digest, load_shard
from megalaunch.engine.checkpoint.safetensors_file import MappedFile
from megalaunch.engine.checkpoint.shard_transfer import receive_shard, send_shard
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.optimizer.outer_optimizer import saved_replicas
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.background_save import AsyncSaveContext, BackgroundSave
from megalaunch.engine.train.checkpointer import (
    Checkpointer,
    read_position,
    restore_counters,
    state_tensors,
    weight_tensors,
)
from megalaunch.engine.train.local_tier import LocalTier, PendingDrain, TierSettings, first_problem, problem_in
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.rundir.checkpoint.contents import WEIGHTS
from megalaunch.rundir.checkpoint.local_shards import SHARD_TENSORS, LocalShard, list_shards, shard_directory
from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
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
        saver: The checkpoints in the run directory, whose thread writes to the disks of the nodes too.
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
        self._directory, self._model, self._optimizer, self._record = directory, model, optimizer, record
        in_background = BackgroundSave(record, spec.checkpoint.memory.interval > 0)
        per_node = int(spec.cluster.devices_per_node)
        self._memory = LocalTier(TierSettings.memory(spec), per_node, directory, record, in_background)
        self._disk = LocalTier(TierSettings.disk(spec), per_node, directory, record, saver.background)
        self._tiers = [tier for tier in (self._memory, self._disk) if tier.is_used]  # the fastest first
        self._resumes = 0

    @property
    def problem(self) -> RankError | None:
        """Error of the save in memory in progress on this rank, if it has failed."""
        return self._memory.background.problem

    def restore(self, after: int) -> TrainProgress | None:
        """Load the newest local checkpoint of a step after `after`; return the progress, or None without one.

        Of one step, that in memory is preferred. Each one that is newer and cannot be loaded is reported with the
        reason.

        Raises:
            CheckpointError: A node has no folder for them; the same on all ranks.
        """
        if not self._tiers:
            return None
        found = [(checkpoint, tier) for tier in self._tiers for checkpoint in self._find(tier, after)]
        layouts = run_on_all_ranks(lambda: self._layout)
        resumes = run_on_rank0(lambda: read_resumes(self._directory.resumes))
        for checkpoint, tier in sorted(found, key=lambda pair: pair[0].age, reverse=True):  # stable: memory first
            problem = problem_of(checkpoint, layouts, resumes)
            while problem is None and self._leave_out_damaged(checkpoint, tier):
                problem = problem_of(checkpoint, layouts, resumes)
            problem = problem or self._fetch(checkpoint, tier)
            if problem is None:
                return self._load(shard_directory(tier.folder.path, tier.folder.rank, checkpoint.step))
            message = f"the {tier.description} of step {checkpoint.step} is not used: {problem}"
            self._record.event("note", message=message)
        return None

    def begin_at(self, step: int) -> None:
        """Record that the run continues from a step: local checkpoints of later steps are no longer of this run."""

        def append() -> int:
            path = self._directory.resumes
            if not self._tiers and not path.exists():
                return 0
            with self._record.fence.hold():
                append_resume(path, self._record.fence.number or 0, step)
            return len(read_resumes(path))

        self._resumes = run_on_rank0(append)

    def is_due(self, step: int) -> bool:
        """Return whether a local checkpoint of a step is saved."""
        return any(tier.is_due(step) for tier in self._tiers)

    def save(self, position: TrainProgress, is_saved: bool) -> None:
        """Save to the tiers whose interval divides the step; return when the state is copied to host memory.

        Waits for the save in progress to the same tier, if any. Raises a RunEnd on every rank if that has failed.

        Args:
            position: The progress of the run.
            is_saved: Whether a checkpoint of the step is saved in the run directory, so that none is written to disk.
        """
        step = position.step
        in_memory, on_disk = self._memory.is_due(step), self._disk.is_due(step) and not is_saved
        if in_memory and on_disk:
            self._save_in_memory_and_drain(position)
        elif in_memory:
            self._stage(self._memory, position)
        elif on_disk:
            self._stage(self._disk, position)

    def wait(self, position: TrainProgress) -> None:
        """Wait for the save in memory in progress, if any. Raises a RunEnd on every rank if it has failed on any."""
        self._memory.background.wait(position)

    def finish(self, reason: str) -> None:
        """Wait for the save in memory in progress, as the run ends for `reason`."""
        self._memory.background.finish(reason)

    def remove(self) -> None:
        """Remove the local checkpoints, after the run has saved its last one in the run directory."""
        for tier in self._tiers:
            tier.remove()

    @cached_property
    def _layout(self) -> str:
        return layout_digest(self._sharded_tensors())

    def _sharded_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that define the layout: with outer steps, those outside a round."""
        outer = self._optimizer.outer
        if outer is None:
            return state_tensors(self._model, self._optimizer)
        return {**weight_tensors(self._model), **self._optimizer.states(), **outer.states()}

    def _find(self, tier: LocalTier, after: int) -> list[LocalCheckpoint]:
        """Return the checkpoints of a tier of steps after `after`, complete or not."""
        folder = tier.folder
        held = run_on_all_ranks(lambda: list_shards(folder.path) if folder.is_first_of_node else [])
        return newest_first(held[:: folder.devices_per_node], after)

    def _leave_out_damaged(self, checkpoint: LocalCheckpoint, tier: LocalTier) -> bool:
        """Verify the shards that the ranks would get; take the damaged ones off the checkpoint. False: none is."""
        folder = tier.folder

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

    def _fetch(self, checkpoint: LocalCheckpoint, tier: LocalTier) -> str | None:
        """Copy shards to the nodes that lack them; return what failed, the same on all ranks."""
        folder, group = tier.folder, tier.background.group
        moves = transfers(choose_sources(checkpoint, folder.devices_per_node), folder.devices_per_node)
        problem = None
        for rank, sender in moves:
            directory = shard_directory(folder.path, rank, checkpoint.step)
            if folder.rank == sender:
                send_shard(directory, rank, group)
            elif folder.rank == rank:
                wrote = partial(self._record.io_progress, "loading", checkpoint.step)
                problem = problem_in(partial(receive_shard, directory, sender, group, wrote))
        problem = first_problem(problem, tier.background)
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

    def _save_in_memory_and_drain(self, position: TrainProgress) -> None:
        """Save in memory, and copy that to disk on the thread of the disk: the next save in memory does not wait."""
        started = time.perf_counter()
        self._disk.background.wait(position)
        waited = time.perf_counter() - started
        self._memory.drain = drain = PendingDrain(position.step)
        written = self._stage(self._memory, position)
        self._disk.background.run(partial(self._drain, drain, written, started, waited))

    def _stage(self, tier: LocalTier, position: TrainProgress) -> SaveThread:
        """Copy the state to host memory, and write it to a tier while training continues."""
        started = time.perf_counter()
        tier.background.wait(position)
        tensors = state_tensors(self._model, self._optimizer)
        return tier.background.stage(position, tensors, started, partial(self._write, tier, self._resumes))

    def _write(
        self,
        tier: LocalTier,
        resumes: int,
        position: TrainProgress,
        tensors: Mapping[str, Tensor],
        started: float,
        async_context: AsyncSaveContext,
        waited: float,
    ) -> None:
        """Write this rank's shard and send a copy of it to the next node. Runs on the thread of the tier."""
        rank, world, step = tier.folder.rank, tier.folder.world, position.step
        shard = LocalShard(rank, step, self._record.fence.number or 0, resumes, world, self._layout)
        values = {name: async_context.copies[name] for name in tensors}
        if tier.write(shard, values, position):
            has_copies = tier.replicate(step)
            tier.publish(step, has_copies, time.perf_counter() - started, waited)

    def _drain(self, drain: PendingDrain, written: SaveThread, started: float, waited: float) -> None:
        """Copy a checkpoint from memory to disk, with the copies of other nodes' shards. Runs on the disk's thread."""
        written.wait(lambda: None)
        if drain.is_complete and self._disk.drain_from(self._memory, drain.step):
            has_copies = self._disk.replicate(drain.step, self._memory if drain.has_copies else None)
            self._disk.publish(drain.step, has_copies, time.perf_counter() - started, waited)
        self._memory.drain = None
