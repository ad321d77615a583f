"""A save on a background thread: copy the state to host memory, write it there, and wait for it where that is due.

A run may have several of them, each with one save at a time: a slow one, to shared storage, delays no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from megalaunch.engine.checkpoint.async_save import PinnedStaging, SaveThread
from megalaunch.engine.checkpoint.coordination import background_group
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.engine.train.rank_sync import raise_on_all_ranks
from megalaunch.engine.train.run_logger import RunLogger


@dataclass(frozen=True)
class AsyncSaveContext:
    """State of an asynchronous save: host copies of this rank's tensors and a gloo group for the save threads."""

    copies: Mapping[str, Tensor]
    group: ProcessGroup | None


class BackgroundWrite(Protocol):
    """Writes a copy of the training state on the save thread; `waited`: seconds in which training waited for it."""

    def __call__(
        self,
        position: TrainProgress,
        tensors: Mapping[str, Tensor],
        started: float,
        async_context: AsyncSaveContext,
        waited: float,
    ) -> None: ...


class BackgroundSave:
    """One save at a time on a thread. The constructor is collective.

    Args:
        record: Log writer of this rank.
        is_used: Whether the run saves on a thread at all.

    Attributes:
        group: Process group of the save threads; None if the run has none, or one process.
    """

    def __init__(self, record: RunLogger, is_used: bool) -> None:
        self._record = record
        self._copies = PinnedStaging()
        self._thread: SaveThread | None = None
        self._step, self._done = 0, 0  # of the save in progress: its step, and bytes written by this rank
        self._waits = 0  # grows while a save waits for the storage
        self.group = background_group() if is_used else None

    @property
    def problem(self) -> RankError | None:
        """Error of the save in progress on this rank, if it has failed; the trainer shares it at the next sync."""
        error = self._thread.error if self._thread else None
        return RankError(error.exit_code, str(error)) if error else None

    def stage(
        self, position: TrainProgress, tensors: Mapping[str, Tensor], started: float, write: BackgroundWrite
    ) -> SaveThread:
        """Copy the state to host memory and call `write` on a thread, which is returned when the copy is done.

        Wait for the save in progress first (`wait`). `started` is the `time.perf_counter` at the start of the save.
        """
        self._record.heartbeat("saving", position.step)
        async_context = AsyncSaveContext(self._copies.stage(tensors), self.group)
        waited = time.perf_counter() - started
        return self.run(partial(write, position, tensors, started, async_context, waited))

    def run(self, work: Callable[[], None]) -> SaveThread:
        """Start a thread that runs `work`. Wait for the save in progress first (`wait`)."""
        self._thread = thread = SaveThread(work)
        return thread

    def report_progress(self, step: int, done: int, total: int, in_background: bool = True) -> None:
        """Record how many bytes of the save of a step this rank has written."""
        self._step, self._done = step, done
        self._record.io_progress("saving", step, done, total, async_context=in_background)

    def report_wait(self) -> None:
        """Record that the save waits for its storage, which is no hang."""
        self._waits += 1

    def wait(self, position: TrainProgress) -> None:
        """Wait for the save in progress, if any. Raises a RunEnd on every rank if it has failed on any."""
        raise_on_all_ranks(self.wait_here(), position.step)

    def wait_here(self) -> RankError | None:
        """Wait for the save in progress on this rank, if any; return its error."""
        if self._thread is None:
            return None
        seen = self._done, self._waits

        def waiting() -> None:
            nonlocal seen
            if (self._done, self._waits) != seen:  # only if bytes were written: a stuck disk is no progress
                seen = self._done, self._waits
                self._record.heartbeat("saving", self._step)

        self._thread.wait(waiting)
        problem, self._thread = self.problem, None
        return problem

    def finish(self, reason: str) -> None:
        """Wait for the save in progress, as the run ends for `reason`; log an event if the save failed otherwise."""
        problem = self.wait_here()
        if problem is not None and problem.reason != reason:
            self._record.event("note", message=problem.reason)
