"""What the workers tell the outside: metrics, events, phases, the sample, and in the end the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.run_end import RankError, RunEnd
from megalaunch.engine.train.train_step import StepResult
from megalaunch.rundir.atomic_file import sync_file, write_file_atomically
from megalaunch.rundir.events import EventName, record_event
from megalaunch.rundir.jsonl import append_line, keep_lines, read_lines
from megalaunch.rundir.outcome import ExitCode, Outcome, reserve_outcome_space, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter

_BYTES_TOLD_SECONDS = 2.0


class RunLogger:
    """Rank 0 writes metrics and events; every rank writes its own progress.

    A file that cannot be written raises nothing: it would leave the other ranks waiting. It becomes `problem`, which
    the loop brings up at the ranks' next agreement, and before it saves a step whose line may be missing.
    """

    def __init__(self, directory: RunDirectory, rank: int, progress: ProgressWriter) -> None:
        self._directory, self._first, self._progress = directory, rank == 0, progress
        self._started = self._bytes_told = time.monotonic()
        self.problem: RankError | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes for all."""
        return self._first

    def phase(self, name: str, step: int | None = None) -> None:
        """A new phase begins: progress of this rank, and an event."""
        self._progress.report(name, step)
        self.event("phase", phase=name, step=self._progress.step, elapsed_seconds=time.monotonic() - self._started)

    def heartbeat(self, phase: str, step: int) -> None:
        """Still moving, inside the loop: progress without an event."""
        self._progress.report(phase, step)

    def io_progress(self, phase: str, step: int, done: int, total: int, async_context: bool = False) -> None:
        """Of long work on files: where it is, told now and then; `beside` training, which tells its own progress."""
        now = time.monotonic()
        if now - self._bytes_told < _BYTES_TOLD_SECONDS:
            return
        self._bytes_told = now
        if not async_context:
            self.heartbeat(phase, step)
        self.event("progress", phase=phase, step=step, done=done, total=total)

    def event(self, name: EventName, **details: object) -> None:
        """Append an event, once for all ranks."""
        self._write(self._directory.events, lambda: record_event(self._directory, name, **details))

    def step(
        self, step: int, result: StepResult, total_tokens: int, seconds: float, memory_bytes: int, waited: float
    ) -> None:
        """Append the metrics line of a step: it took `seconds`, of which it `waited` for tokens.

        `total_tokens` counts from step 1.
        """
        line = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens": total_tokens,
            "tokens_per_second": result.tokens / seconds,
            "step_seconds": seconds,
            "data_seconds": waited,
            "memory_bytes": memory_bytes,
        }
        self._write(self._directory.metrics, lambda: append_line(self._directory.metrics, line))

    def validation(self, step: int, loss: float) -> None:
        """Append the metrics line of a validation."""
        line = {"step": step, "validation_loss": loss}
        self._write(self._directory.metrics, lambda: append_line(self._directory.metrics, line))

    def sample(self, text: str) -> None:
        """Keep what the finished model wrote; without it nothing is lost, so a failure is a note."""
        if not self._first:
            return
        try:
            write_file_atomically(self._directory.sample, text)
        except OSError as error:
            self.event("note", message=f"the sample could not be kept: {error}")

    def reserve_outcome_space(self) -> None:
        """At the start: make sure that the end can be told on a full disk too."""
        self._write(self._directory.outcome, lambda: reserve_outcome_space(self._directory.outcome))

    def outcome(self, ending: RunEnd) -> None:
        """Say how the run ended, once for all ranks; raises OSError when even that cannot be written."""
        if self._first:
            outcome = Outcome(ending.exit_code, ending.reason, ending.step, ending.details)
            write_outcome(self._directory.outcome, outcome)
        self.event("outcome", exit_code=int(ending.exit_code), reason=ending.reason)

    def last_validation(self) -> int:
        """The step of the newest validation on record, 0 when there is none."""
        return max(
            (line["step"] for line in read_lines(self._directory.metrics) if "validation_loss" in line), default=0
        )

    def truncate_metrics_after(self, step: int) -> None:
        """Drop the metrics of steps that will be computed again."""

        def cut() -> None:
            last = self._last_step()
            lines = keep_lines(self._directory.metrics, lambda line: line.get("step", 0) <= step)
            if lines:
                self.event("metrics_cut", after_step=step, lines=lines, last_step=last)

        self._write(self._directory.metrics, cut)

    def report_logging_gap(self, step: int) -> None:
        """Say which steps up to `step` have no line: a power cut can take lines that no checkpoint vouched for."""
        if not self._first:
            return
        told = {line.get("step") for line in read_lines(self._directory.metrics) if "loss" in line}
        missing = [number for number in range(1, step + 1) if number not in told]
        if missing:
            self.event("metrics_gap", until_step=step, missing=len(missing), first=missing[0], last=missing[-1])

    def sync_metrics(self) -> None:
        """Force the metrics to disk, before a checkpoint vouches for them. Raises CheckpointError."""
        try:
            sync_file(self._directory.metrics)
        except OSError as error:
            message = f"{self._directory.metrics} cannot be forced to disk: {error.strerror}"
            raise CheckpointError(message) from error

    def last_saved(self) -> int | None:
        """The step of the newest checkpoint on record, None when there is none."""
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
            reason = f"{path} cannot be written: {error.strerror}; mend that, then run the same command again"
            self.problem = self.problem or RankError(ExitCode.CHECKPOINT, reason)
