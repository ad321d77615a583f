"""Write a run's metrics, events, progress, final sample and outcome into its run directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.run_end import RankError, RunEnd
from megalaunch.engine.train.step_metrics import step_metrics
from megalaunch.engine.train.train_step import StepResult
from megalaunch.fs import sync_file, write_file_atomically
from megalaunch.rundir.events import EventName, record_event
from megalaunch.rundir.expert_load import append_expert_load, truncate_expert_load
from megalaunch.rundir.jsonl import append_line, keep_lines, read_lines
from megalaunch.rundir.metrics import with_time
from megalaunch.rundir.outcome import ExitCode, Outcome, reserve_outcome_space, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter

_IO_REPORT_SECONDS = 2.0


class RunLogger:
    """Log writer of one rank: rank 0 writes metrics and events, every rank writes its own progress.

    A failed write raises nothing here, since the other ranks would wait in their next collective. It is stored as
    `problem`, which the trainer shares with all ranks at the next sync, and before it saves a checkpoint of a step
    whose metrics line may be missing.
    """

    def __init__(self, directory: RunDirectory, rank: int, progress: ProgressWriter) -> None:
        self._directory, self._first, self._progress = directory, rank == 0, progress
        self._started = self._io_reported = time.monotonic()
        self.problem: RankError | None = None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes metrics and events."""
        return self._first

    def phase(self, name: str, step: int | None = None) -> None:
        """Record the start of a phase: progress of this rank, and an event."""
        self._progress.report(name, step)
        self.event("phase", phase=name, step=self._progress.step, elapsed_seconds=time.monotonic() - self._started)

    def heartbeat(self, phase: str, step: int) -> None:
        """Record progress of this rank without an event."""
        self._progress.report(phase, step)

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
        self._write(self._directory.events, lambda: record_event(self._directory, name, **details))

    def step(
        self, step: int, result: StepResult, total_tokens: int, seconds: float, memory_bytes: int, waited: float
    ) -> None:
        """Append the metrics line of a step; arguments of `step_metrics`."""
        line = step_metrics(step, result, total_tokens, seconds, memory_bytes, waited)
        self._write(self._directory.metrics, lambda: append_line(self._directory.metrics, with_time(line)))

    def left_out(self, step: int, total_tokens: int) -> None:
        """Append the metrics line of a step whose batch is left out: it has no loss."""
        line = {"step": step, "left_out": True, "tokens": total_tokens}
        self._write(self._directory.metrics, lambda: append_line(self._directory.metrics, with_time(line)))

    def expert_load(self, step: int, layers: Sequence[int], counts_LE: Tensor) -> None:
        """Append the tokens sent to each expert of these layers in a step."""
        path = self._directory.expert_load
        self._write(path, lambda: append_expert_load(path, step, layers, counts_LE.numpy()))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics line of a validation or of an evaluation of tasks (keys: rundir/metrics.py)."""
        line = {"step": step, **values}
        self._write(self._directory.metrics, lambda: append_line(self._directory.metrics, with_time(line)))

    def sample(self, text: str) -> None:
        """Write the text that the final model generated. A failure is only logged, since training is complete."""
        if not self._first:
            return
        try:
            write_file_atomically(self._directory.sample, text)
        except OSError as error:
            self.event("note", message=f"the sample could not be saved: {error}")

    def reserve_outcome_space(self) -> None:
        """Reserve disk space for the outcome, so that it can be written even if the disk fills up."""
        self._write(self._directory.outcome, lambda: reserve_outcome_space(self._directory.outcome))

    def outcome(self, ending: RunEnd) -> None:
        """Write how the run ended; rank 0 only. Raises OSError if the file cannot be written."""
        if self._first:
            outcome = Outcome(ending.exit_code, ending.reason, ending.step, ending.details)
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
        told = {line.get("step") for line in lines if "loss" in line or "left_out" in line}
        missing = [number for number in range(1, step + 1) if number not in told]
        if missing:
            self.event("metrics_gap", until_step=step, missing=len(missing), first=missing[0], last=missing[-1])

    def sync_metrics(self) -> None:
        """Sync the metrics to disk, before a checkpoint of their step is saved. Raises CheckpointError."""
        for path in (self._directory.metrics, self._directory.expert_load):
            try:
                sync_file(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be forced to disk: {error.strerror}") from error

    def last_saved(self) -> int | None:
        """Return the step of the newest checkpoint in the events; None without one."""
        saved = [line["step"] for line in read_lines(self._directory.events) if line.get("event") == "checkpoint"]
        return saved[-1] if saved else None

    def _last_step(self) -> int:
        return max((line.get("step", 0) for line in read_lines(self._directory.metrics)), default=0)

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        if not self._first:
            return
        try:
            write()
        except OSError as error:
            reason = f"{path} cannot be written: {error.strerror}; fix that, then run the same command again"
            self.problem = self.problem or RankError(ExitCode.CHECKPOINT, reason)
