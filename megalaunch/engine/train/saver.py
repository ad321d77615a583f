"""When and how a run is saved: at once or beside training, one checkpoint at a time, then what to keep of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.engine.checkpoint.beside import Background, HostCopies
from megalaunch.engine.checkpoint.ranks import background_group, from_first_rank
from megalaunch.engine.checkpoint.store import remove_old
from megalaunch.engine.ending import Problem
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.train.agreement import end_together
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.record import Record
from megalaunch.engine.train.saving import Beside, Position, save_run, state_tensors
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory


class Saver:
    """The saves of one run; made, and every method called, on all ranks alike.

    `saved` is the newest finished checkpoint.
    """

    def __init__(
        self, spec: RunSpec, directory: RunDirectory, model: ModelParts, optimizer: NamedAdamW, record: Record
    ) -> None:
        self._spec, self._directory, self._record = spec, directory, record
        self._model, self._optimizer = model, optimizer
        self.saved: Path | None = None
        self._copies = HostCopies()
        self._background: Background | None = None
        self._step, self._done = 0, 0  # of the save under way: its step, and bytes of this rank written
        beside = spec.checkpoint.asynchronous and spec.checkpoint.interval > 0
        self._group = background_group() if beside else None

    @property
    def problem(self) -> Problem | None:
        """Why the save under way failed, once this rank knows; the loop brings it up at the ranks' next agreement."""
        error = self._background.error if self._background else None
        return Problem(ExitCode.CHECKPOINT, str(error)) if error else None

    def save(self, position: Position) -> None:
        """Save now, and return when it is done; raises CheckpointError (or an Ending) alike on all ranks."""
        started = time.perf_counter()
        if self._begin(position):
            self._record.phase("saving", position.step)
            self._write(position, state_tensors(self._model, self._optimizer), started)

    def save_beside(self, position: Position) -> None:
        """Return when the state is copied (to the one save at a time: also when the one before is done).

        Its failure is a `problem` later. Without `checkpoint.asynchronous` this is `save`.
        """
        if not self._spec.checkpoint.asynchronous:
            self.save(position)
            return
        started = time.perf_counter()
        if not self._begin(position):
            return
        self._record.at("saving", position.step)
        # The model's parameters of now: while it computes, those that it names are gathered ones.
        tensors = state_tensors(self._model, self._optimizer)
        beside = Beside(self._copies.take(tensors), self._group)
        waited = time.perf_counter() - started
        self._background = Background(partial(self._write, position, tensors, started, beside, waited))

    def finish(self, reason: str) -> None:
        """The run ends for another `reason`: wait for the save under way, and tell it if that fails."""
        problem = self._settle()
        if problem is not None and problem.reason != reason:
            self._record.event("note", message=problem.reason)

    def _begin(self, position: Position) -> bool:
        """One save at a time; False when this step is saved already. A checkpoint vouches for the metrics before it."""
        problem = self._settle()
        end_together(self._record.problem or problem, position.step)
        if self.saved == self._directory.checkpoint(position.step):
            return False
        from_first_rank(self._record.sync_metrics)
        return True

    def _settle(self) -> Problem | None:
        """Wait for the save under way; why it failed, if it did."""
        if self._background is None:
            return None
        seen = self._done

        def waiting() -> None:
            nonlocal seen
            if self._done != seen:  # a disk that stands still is no progress
                seen = self._done
                self._record.at("saving", self._step)

        self._background.wait(waiting)
        problem, self._background = self.problem, None
        return problem

    def _write(
        self,
        position: Position,
        tensors: Mapping[str, Tensor],
        started: float,
        beside: Beside | None = None,
        waited: float | None = None,
    ) -> None:
        """The save itself; of one beside training, the part on its own thread."""
        self._step, self._done = position.step, 0

        def wrote(done: int, total: int) -> None:
            self._done = done
            self._record.bytes_done("saving", position.step, done, total, beside=beside is not None)

        saved = save_run(self._directory, self._spec, tensors, position, wrote, beside)
        seconds = time.perf_counter() - started
        waited = seconds if waited is None else waited
        self._record.event("checkpoint", step=position.step, path=str(saved), seconds=seconds, waited_seconds=waited)
        if self._record.is_first:
            self._remove_old(saved)
        self.saved = saved

    def _remove_old(self, newest: Path) -> None:
        try:
            settings = self._spec.checkpoint
            remove_old(self._directory.checkpoints, settings.keep_last, newest, settings.keep_every)
        except OSError as error:  # what is saved is saved
            self._record.event("note", message=f"old checkpoints could not be removed: {error}")
