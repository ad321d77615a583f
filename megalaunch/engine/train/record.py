"""What the workers tell the outside: metrics lines, events, phases."""

from __future__ import annotations

import time

from megalaunch.engine.train.step import StepResult
from megalaunch.rundir.events import EventName, record_event
from megalaunch.rundir.lines import append_line, keep_lines, read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


class Record:
    """Rank 0 writes metrics and events; every rank writes its own progress."""

    def __init__(self, directory: RunDirectory, rank: int, progress: ProgressWriter) -> None:
        self._directory, self._first, self._progress = directory, rank == 0, progress
        self._started = time.monotonic()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes for all."""
        return self._first

    def phase(self, name: str, step: int | None = None) -> None:
        """A new phase begins: progress of this rank, and an event."""
        self._progress.report(name, step)
        self.event("phase", phase=name, step=self._progress.step, elapsed_seconds=time.monotonic() - self._started)

    def at(self, phase: str, step: int) -> None:
        """Progress inside the loop: no event."""
        self._progress.report(phase, step)

    def event(self, name: EventName, **details: object) -> None:
        """Append an event, once for all ranks."""
        if self._first:
            record_event(self._directory, name, **details)

    def step(self, step: int, result: StepResult, total_tokens: int, seconds: float, memory_bytes: int) -> None:
        """Append the metrics line of a step."""
        if self._first:
            append_line(
                self._directory.metrics,
                {
                    "step": step,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "learning_rate": result.learning_rate,
                    "tokens": total_tokens,
                    "tokens_per_second": result.tokens / seconds,
                    "step_seconds": seconds,
                    "memory_bytes": memory_bytes,
                },
            )

    def validation(self, step: int, loss: float) -> None:
        """Append the metrics line of a validation."""
        if self._first:
            append_line(self._directory.metrics, {"step": step, "validation_loss": loss})

    def has_validation(self, step: int) -> bool:
        """Whether the validation after `step` is on record."""
        return any(
            line.get("step") == step and "validation_loss" in line for line in read_lines(self._directory.metrics)
        )

    def cut_after(self, step: int) -> None:
        """Drop the metrics of steps that will be computed again."""
        if self._first:
            lines = keep_lines(self._directory.metrics, lambda line: line.get("step", 0) <= step)
            if lines:
                self.event("metrics_cut", after_step=step, lines=lines)
