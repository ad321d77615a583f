"""Read a trial's result from its run directory, and rank the trials.

Only a trial whose outcome is DONE is ranked; measurements of a failed one do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

from megalaunch.config.search_space import Values
from megalaunch.launch.run_state import number
from megalaunch.launch.sweep.directory import LOWER_IS_BETTER, Metric
from megalaunch.rundir.jsonl import Record, read_lines
from megalaunch.rundir.outcome import ExitCode, read_outcome
from megalaunch.rundir.paths import RunDirectory

State = Literal["waiting", "unfinished", "done", "failed"]
WARM_UP_STEPS = 2  # minimum; a tenth of the steps in a longer run
_NOT_VALIDATED = "no validation loss was measured; the same command with --metric loss ranks by the training loss"
_RESUMABLE = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of all devices over `steps` steps after warm-up: median and interquartile range."""

    median: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial. `seconds` is the time in steps, `loss` the last one, `reason` why it is not ranked."""

    number: int
    values: Values
    state: State
    exit_code: int | None = None
    reason: str = ""
    steps: int = 0
    seconds: float = 0.0
    speed: Speed | None = None
    loss: float | None = None
    validation_loss: float | None = None

    def score(self, metric: Metric) -> float | None:
        """Return the metric of a trial that is done; None for any other trial, or if the metric is not finite."""
        if self.state != "done":
            return None
        speed = self.speed.median if self.speed else None
        value = {"validation_loss": self.validation_loss, "loss": self.loss, "tokens_per_second": speed}[metric]
        return value if value is not None and math.isfinite(value) else None


def read_result(trial: int, values: Values, directory: RunDirectory) -> TrialResult:
    """Read a trial's outcome and metrics; state "waiting" if it was never launched."""
    outcome = read_outcome(directory.outcome)
    steps = [record for record in read_lines(directory.metrics) if "loss" in record]
    if outcome is None and not steps:
        return TrialResult(trial, values, "waiting")
    state: State = "unfinished"
    if outcome is not None and outcome.exit_code not in _RESUMABLE:
        state = "done" if outcome.exit_code == ExitCode.DONE else "failed"
    return TrialResult(
        trial,
        values,
        state,
        outcome.exit_code if outcome else None,
        outcome.reason if outcome and state != "done" else "",
        len(steps),
        math.fsum(number(record, "step_seconds") for record in steps),
        read_speed(steps),
        number(steps[-1], "loss") if steps else None,
        _last_validation(directory),
    )


def read_speed(steps: Sequence[Record]) -> Speed | None:
    """Return the speed over the steps after warm-up; None when fewer than two are left."""
    skipped = max(WARM_UP_STEPS, len(steps) // 10)
    rates = [rate for record in steps[skipped:] if math.isfinite(rate := number(record, "tokens_per_second"))]
    if len(rates) < 2:
        return None
    low, _, high = quantiles(rates, n=4, method="inclusive")
    return Speed(median(rates), low, high, len(rates))


def _last_validation(directory: RunDirectory) -> float | None:
    losses = [number(record, "validation_loss") for record in read_lines(directory.metrics)]
    finite = [loss for loss in losses if not math.isnan(loss)]
    return finite[-1] if finite else None


def rank_results(results: Sequence[TrialResult], metric: Metric) -> list[TrialResult]:
    """Return the ranked trials, best first; ties in the order of their numbers."""
    scored = [(score, result) for result in results if (score := result.score(metric)) is not None]
    sign = 1 if metric in LOWER_IS_BETTER else -1
    return [result for _, result in sorted(scored, key=lambda pair: (sign * pair[0], pair[1].number))]


def unranked_reason(result: TrialResult, metric: Metric) -> str:
    """Return why a trial is not ranked; "" if it is."""
    if result.score(metric) is not None:
        return ""
    if result.state != "done":
        return result.reason or result.state
    if metric == "validation_loss":
        return _NOT_VALIDATED if result.validation_loss is None else "validation loss not finite"
    if metric == "loss":
        return "the last training loss is not finite"
    return f"{result.steps} steps are too few for a speed; {WARM_UP_STEPS + 2} are needed"
