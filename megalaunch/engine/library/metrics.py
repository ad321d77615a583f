"""The metrics of a loop of one's own, in the format of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.train.step_metrics import step_metrics
from megalaunch.engine.train.train_step import StepResult
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.metrics import with_time


class MetricsWriter:
    """Write a line of JSON for each step, with the keys of a run's `metrics.jsonl` (docs/run_directory.md).

    Args:
        path: The file, to which lines are appended.
        mesh: The device mesh: rank 0 writes.
        tokens: Tokens of the steps before the first line, in a resumed loop.
    """

    def __init__(self, path: Path, mesh: Mesh, tokens: int = 0) -> None:
        self._path, self._mesh, self._tokens = path, mesh, tokens
        self._last = time.perf_counter()

    def step(self, step: int, result: StepResult, data_seconds: float = 0.0) -> Mapping[str, object]:
        """Append the line of a step and return it; the step began with the writer, or with the line before.

        Args:
            step: Number of the step, from 1.
            result: What `TrainStep.run` returned, or `StepResult(loss, grad_norm, learning_rate, tokens)`.
            data_seconds: Seconds of the step spent waiting for data (`StepBatch.data_time`).

        Raises:
            OSError: The file cannot be written.
        """
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._tokens += result.tokens
        memory = platform_of(self._mesh.device).max_memory_allocated(self._mesh.device)
        line = with_time(step_metrics(step, result, self._tokens, seconds, memory, data_seconds))
        if self._mesh.rank == 0:
            append_line(self._path, line)
        return line
