"""Save checkpoints of a run, synchronously or asynchronously, one at a time, and remove old ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.engine.checkpoint.async_save import PinnedStaging, SaveThread
from megalaunch.engine.checkpoint.coordination import background_group, run_on_rank0
from megalaunch.engine.checkpoint.store import prune_checkpoints
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.rank_sync import raise_on_all_ranks
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.engine.train.train_state import AsyncSaveContext, TrainProgress, save_run, state_tensors
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory


class Checkpointer:
    """Synchronous and asynchronous saves of one run. The constructor and every method are collective.

    Attributes:
        saved: Directory of the newest finished checkpoint; None before the first.
    """

    def __init__(
        self, spec: RunSpec, directory: RunDirectory, model: ModelParts, optimizer: NamedAdamW, record: RunLogger
    ) -> None:
        self._spec, self._directory, self._record = spec, directory, record
        self._model, self._optimizer = model, optimizer
        self.saved: Path | None = None
        self._copies = PinnedStaging()
        self._background: SaveThread | None = None
        self._step, self._done = 0, 0  # of the save in progress: its step, and bytes written by this rank
        async_context = spec.checkpoint.async_save and spec.checkpoint.interval > 0
        self._group = background_group() if async_context else None

    @property
    def problem(self) -> RankError | None:
        """Error of the save in progress on this rank, if it has failed; the trainer shares it at the next sync."""
        error = self._background.error if self._background else None
        return RankError(ExitCode.CHECKPOINT, str(error)) if error else None

    def save(self, position: TrainProgress) -> None:
        """Save synchronously. Raises CheckpointError or a RunEnd, the same on all ranks."""
        started = time.perf_counter()
        if self._begin(position):
            self._record.phase("saving", position.step)
            self._write(position, state_tensors(self._model, self._optimizer), started)

    def save_async(self, position: TrainProgress) -> None:
        """Copy the state to host memory and write it on a background thread; return when the copy is done.

        There is one save at a time: wait for the previous one first. A failure is reported later, as `problem`.
        Without `checkpoint.async_save` this is `save`.
        """
        if not self._spec.checkpoint.async_save:
            self.save(position)
            return
        started = time.perf_counter()
        if not self._begin(position):
            return
        self._record.heartbeat("saving", position.step)
        # Take the sharded parameters now: during a forward pass the model's attributes are FSDP's gathered ones.
        tensors = state_tensors(self._model, self._optimizer)
        async_context = AsyncSaveContext(self._copies.stage(tensors), self._group)
        waited = time.perf_counter() - started
        self._background = SaveThread(partial(self._write, position, tensors, started, async_context, waited))

    def finish(self, reason: str) -> None:
        """Wait for the save in progress, as the run ends for `reason`; log an event if the save failed otherwise."""
        problem = self._wait_for_pending()
        if problem is not None and problem.reason != reason:
            self._record.event("note", message=problem.reason)

    def _begin(self, position: TrainProgress) -> bool:
        """Wait for the previous save and sync the metrics to disk; return False if this step is already saved.

        A resume keeps the metrics up to its checkpoint's step, so they must be on disk before the checkpoint is.
        """
        problem = self._wait_for_pending()
        raise_on_all_ranks(self._record.problem or problem, position.step)
        if self.saved == self._directory.checkpoint(position.step):
            return False
        run_on_rank0(self._record.sync_metrics)
        return True

    def _wait_for_pending(self) -> RankError | None:
        """Wait for the save in progress, if any; return its error."""
        if self._background is None:
            return None
        seen = self._done

        def waiting() -> None:
            nonlocal seen
            if self._done != seen:  # report a heartbeat only if bytes were written: a stuck disk is no progress
                seen = self._done
                self._record.heartbeat("saving", self._step)

        self._background.wait(waiting)
        problem, self._background = self.problem, None
        return problem

    def _write(
        self,
        position: TrainProgress,
        tensors: Mapping[str, Tensor],
        started: float,
        async_context: AsyncSaveContext | None = None,
        waited: float | None = None,
    ) -> None:
        """Write the checkpoint and remove old ones. An asynchronous save runs this on its thread."""
        self._step, self._done = position.step, 0

        def wrote(done: int, total: int) -> None:
            self._done = done
            self._record.io_progress("saving", position.step, done, total, async_context=async_context is not None)

        saved = save_run(self._directory, self._spec, tensors, position, wrote, async_context)
        seconds = time.perf_counter() - started
        waited = seconds if waited is None else waited
        self._record.event("checkpoint", step=position.step, path=str(saved), seconds=seconds, waited_seconds=waited)
        if self._record.is_first:
            self._remove_old(saved)
        self.saved = saved

    def _remove_old(self, newest: Path) -> None:
        try:
            settings = self._spec.checkpoint
            prune_checkpoints(self._directory.checkpoints, settings.keep_last, newest, settings.keep_every)
        except OSError as error:  # the new checkpoint is complete: a failure to prune is only logged
            self._record.event("note", message=f"old checkpoints could not be removed: {error}")
