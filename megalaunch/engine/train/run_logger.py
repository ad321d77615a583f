"""Write a run's metrics, events, progress, final sample and outcome into its run directory."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megalaunch.engine.checkpoint.errors import storage_error
from megalaunch.engine.run_end import RankError, RunEnd, exit_code_of
from megalaunch.engine.train.step_metrics import step_metrics
from megalaunch.engine.train.storage_waits import StorageWaits
from megalaunch.engine.train.train_step import StepResult
from megalaunch.format.numbers import format_duration
from megalaunch.fs import sync_file, write_file_atomically
from megalaunch.rundir.events import EventName, make_event
from megalaunch.rundir.expert_load import append_expert_load, truncate_expert_load
from megalaunch.rundir.fence import Fence
from megalaunch.rundir.jsonl import Record, append_line, keep_lines, read_lines
from megalaunch.rundir.metrics import with_time
from megalaunch.rundir.outcome import ExitCode, Outcome, reserve_outcome_space, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.pending_writes import FailedWrite, PendingWrites
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.rundir.storage_wait import StorageWait, remedy

_IO_REPORT_SECONDS = 2.0


class RunLogger:
    """Log writer of one rank: rank 0 writes metrics and events, every rank writes its own progress.

    A failed write raises nothing here, since the other ranks would wait in their next collective. Training continues
    while the writes wait in memory for the storage. At the deadline the failure is the `problem`, which the trainer
    shares with all ranks at the next sync. A checkpoint is saved only after all writes (`sync_metrics`).

    Args:
        directory: The run directory.
        rank: Global rank of this worker.
        progress: Writer of this rank's progress file.
        storage_timeout: Seconds that writes wait for the storage (`run.storage_timeout`).
        stop: Returns the signal to stop that this rank received, if any.
        fence: The right of this attempt to write, checked before each write; None: it is not checked.

    Attributes:
        waits_for_storage: False once the ranks have waited in vain.
    """

    def __init__(
        self,
        directory: RunDirectory,
        rank: int,
        progress: ProgressWriter,
        storage_timeout: float = 0.0,
        stop: Callable[[], signal.Signals | None] = lambda: None,
        fence: Fence | None = None,
    ) -> None:
        self._directory, self._first, self._progress = directory, rank == 0, progress
        self.fence = fence or Fence(directory.attempts)
        self._started = self._io_reported = time.monotonic()
        self._storage_timeout, self.stop, self.waits_for_storage = storage_timeout, stop, True
        self._wait, self._waits = self.storage_wait(), StorageWaits()
        self._pending = PendingWrites(self._wait, self._on_wait, self._on_storage_back)
        self._problem: RankError | None = None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes metrics and events."""
        return self._first

    @property
    def problem(self) -> RankError | None:
        """The error of this rank once a write was refused, or its storage did not return in time."""
        if self._problem is None:
            self._problem = self._find_problem()
        return self._problem

    def _find_problem(self) -> RankError | None:
        if self._wait.is_over:
            self._pending.flush(at_once=True)
        failed, waited = self._pending.refused, ""
        if failed is None and self._wait.is_over:
            failed, waited = self._pending.failed, describe_wait(self._wait, self.stop())
        if failed is None:
            return None
        stop = self.stop() if waited else None
        code = ExitCode.CHECKPOINT if stop is None else exit_code_of(stop)
        return RankError(code, f"{failed.message}{waited}; fix that, then run the same command again")

    def storage_wait(self) -> StorageWait:
        """Return a new wait for the storage, with the deadline of this run; it is over at once after one in vain."""
        timeout = self._storage_timeout if self.waits_for_storage else 0.0
        return StorageWait(timeout, lambda: self.stop() is not None)

    def storage_fails(self, path: Path, reason: str, fix: str, seconds_left: float) -> None:
        """Record that a wait for the storage begins; nothing if one for this file has begun before."""
        if self._waits.begin(path):
            self.event("storage_wait", path=str(path), reason=reason, fix=fix, seconds_left=seconds_left)

    def storage_is_back(self, path: Path, reason: str, seconds: float) -> None:
        """Record that a wait for the storage has ended, once no other one for this file is left."""
        if (longest := self._waits.end(path, seconds)) is not None:
            self.event("storage_back", path=str(path), reason=reason, seconds=longest)

    def _on_wait(self, failed: FailedWrite) -> None:
        self.storage_fails(failed.path, str(failed.error.strerror), remedy(failed.error), self._wait.seconds_left)

    def _on_storage_back(self, failed: FailedWrite, seconds: float) -> None:
        self.storage_is_back(failed.path, str(failed.error.strerror), seconds)

    def phase(self, name: str, step: int | None = None) -> None:
        """Record the start of a phase: progress of this rank, and an event."""
        self._progress.report(name, step)
        self.event("phase", phase=name, step=self._progress.step, elapsed_seconds=time.monotonic() - self._started)

    def heartbeat(self, phase: str, step: int) -> None:
        """Record progress of this rank without an event."""
        self._progress.report(phase, step)
        self._pending.flush()

    def io_progress(self, phase: str, step: int, done: int, total: int, async_context: bool = False) -> None:
        """Record the progress of long file I/O, at most every 2 seconds.

        Args:
            phase: Name of the work.
            step: Step that it belongs to.
            done: Finished part, in the unit of `total`.
            total: All of the work.
            async_context: The work runs in the background of training, which reports its own heartbeats.
        """
        now = time.monotonic()
        if now - self._io_reported < _IO_REPORT_SECONDS:
            return
        self._io_reported = now
        if not async_context:
            self.heartbeat(phase, step)
        self.event("progress", phase=phase, step=step, done=done, total=total)

    def event(self, name: EventName, **details: object) -> None:
        """Append an event; rank 0 only."""
        self._append(self._directory.events, make_event(name, **details))

    def step(
        self, step: int, result: StepResult, total_tokens: int, seconds: float, memory_bytes: int, waited: float
    ) -> None:
        """Append the metrics line of a step; arguments of `step_metrics`."""
        line = step_metrics(step, result, total_tokens, seconds, memory_bytes, waited)
        self._append(self._directory.metrics, with_time(line))

    def left_out(self, step: int, total_tokens: int) -> None:
        """Append the metrics line of a step whose batch is left out: it has no loss."""
        line = {"step": step, "left_out": True, "tokens": total_tokens}
        self._append(self._directory.metrics, with_time(line))

    def expert_load(self, step: int, layers: Sequence[int], counts_LE: Tensor) -> None:
        """Append the tokens sent to each expert of these layers in a step."""
        path = self._directory.expert_load
        self._write(path, lambda: append_expert_load(path, step, layers, counts_LE.numpy()))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics line of a validation or of an evaluation of tasks (keys: rundir/metrics.py)."""
        line = {"step": step, **values}
        self._append(self._directory.metrics, with_time(line))

    def sample(self, text: str) -> None:
        """Write the text that the final model generated. A failure is only logged, since training is complete."""
        if not self._first:
            return
        try:
            with self.fence.hold():
                write_file_atomically(self._directory.sample, text)
        except OSError as error:
            self.event("note", message=f"the sample could not be saved: {error}")

    def claim_run(self) -> None:
        """Claim the right to write; rank 0 only."""
        self._write(self._directory.attempts, self.fence.claim)
        if self.fence.killed:
            self.event("note", message=self.fence.killed)

    def reserve_outcome_space(self) -> None:
        """Reserve disk space for the outcome, so that it can be written even if the disk fills up."""
        self._write(self._directory.outcome, lambda: reserve_outcome_space(self._directory.outcome))

    def outcome(self, ending: RunEnd) -> None:
        """Write how the run ended; rank 0 only. Raises OSError if the file cannot be written."""
        if self._first:
            outcome = Outcome(ending.exit_code, ending.reason, ending.step, ending.details)
            with self.fence.hold():
                write_outcome(self._directory.outcome, outcome)
        self.event("outcome", exit_code=int(ending.exit_code), reason=ending.reason)

    def last_step_of(self, kind: Callable[[Mapping[str, Any]], bool]) -> int:
        """Return the step of the newest line in the metrics for which `kind` is true; 0 without one."""
        return max((line["step"] for line in read_lines(self._directory.metrics) if kind(line)), default=0)

    def last_losses(self, count: int) -> list[float]:
        """Return the losses of the last `count` steps in the metrics."""
        losses = [line["loss"] for line in read_lines(self._directory.metrics) if "loss" in line]
        return losses[-count:]

    def truncate_metrics_after(self, step: int) -> None:
        """Remove the metrics of steps after `step`, which will be recomputed."""

        def cut() -> None:
            last = self._last_step()
            with self.fence.hold():
                lines = keep_lines(self._directory.metrics, lambda line: line.get("step", 0) <= step)
            if lines:
                self.event("metrics_cut", after_step=step, lines=lines, last_step=last)

        self._write(self._directory.metrics, cut)
        self._write(self._directory.expert_load, lambda: truncate_expert_load(self._directory.expert_load, step))

    def report_logging_gap(self, step: int) -> None:
        """Log an event if steps up to `step` have no metrics: a power cut can lose lines not yet synced to disk."""
        if not self._first:
            return
        lines = read_lines(self._directory.metrics)
        logged = {line.get("step") for line in lines if "loss" in line or "left_out" in line}
        missing = [number for number in range(1, step + 1) if number not in logged]
        if missing:
            self.event("metrics_gap", until_step=step, missing=len(missing), first=missing[0], last=missing[-1])

    def flush(self) -> None:
        """Write all that waits for the storage. Raises CheckpointError."""
        self._pending.flush(at_once=True)
        if (failed := self._pending.failed) is not None:
            raise storage_error(failed.message, failed.path, failed.error)

    def sync_metrics(self) -> None:
        """Sync the metrics to disk, before a checkpoint of their step is saved. Raises CheckpointError."""
        self.flush()
        for path in (self._directory.metrics, self._directory.expert_load):
            try:
                sync_file(path)
            except OSError as error:
                raise storage_error(f"{path} cannot be forced to disk: {error.strerror}", path, error) from error

    def last_saved(self) -> int | None:
        """Return the step of the newest checkpoint in the events; None without one."""
        saved = [line["step"] for line in read_lines(self._directory.events) if line.get("event") == "checkpoint"]
        return saved[-1] if saved else None

    def _last_step(self) -> int:
        return max((line.get("step", 0) for line in read_lines(self._directory.metrics)), default=0)

    def _append(self, path: Path, record: Record) -> None:
        self._write(path, lambda: append_line(path, record))

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        def write_if_newest() -> None:
            self.fence.check()
            write()

        if self._first:
            self._pending.add(path, write_if_newest)


def describe_wait(wait: StorageWait, stop: signal.Signals | None) -> str:
    """Return what ended a wait for the storage, to append to the failure; nothing for a run that does not wait."""
    if stop is not None:
        return f" (stopped by {stop.name} while the run waited for it)"
    return f" (the run waited {format_duration(wait.seconds)} for it: run.storage_timeout)" if wait.seconds >= 1 else ""
