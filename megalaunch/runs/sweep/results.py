"""Read the results of trials from their run directories, rank them, and write results.csv and results.png.

Only a trial whose outcome is DONE is ranked; measurements of a failed one do not count.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

from megalaunch.config.search_space import Values
from megalaunch.fs import atomic_file, write_file_atomically
from megalaunch.launch.run_state import number
from megalaunch.rundir.jsonl import Record, read_lines
from megalaunch.rundir.outcome import ExitCode, read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.sweep.folder import LOWER_IS_BETTER, Metric, SweepFolder
from megalaunch.runs.sweep.plan import PlannedSweep, ValidatedPoint

State = Literal["waiting", "unfinished", "done", "failed"]
WARM_UP_STEPS = 2  # minimum; a tenth of the steps in a longer run
_NOT_VALIDATED = "no validation loss was measured; run the same command with --metric loss to rank by the training loss"
_COLUMNS = (
    "exit_code",
    "tokens_per_second",
    "tokens_per_second_25",
    "tokens_per_second_75",
    "measured_steps",
    "loss",
    "validation_loss",
    "steps",
    "seconds",
    "directory",
    "reason",
)
_BARS = 30
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


def is_due(planned: PlannedSweep, point: ValidatedPoint) -> bool:
    """Return whether a point has yet to run: it has no outcome, or a failed one that shall be tried again."""
    state = read_result(point.number, point.values, planned.request.folder.trial(point.number)).state
    return state in ("waiting", "unfinished") or (planned.request.retry_failed and state == "failed")


def read_speed(steps: Sequence[Record]) -> Speed | None:
    """Return the speed over the steps after warm-up; None when fewer than two are left."""
    warm_up = max(WARM_UP_STEPS, len(steps) // 10)
    rates = [rate for record in steps[warm_up:] if math.isfinite(rate := number(record, "tokens_per_second"))]
    if len(rates) < 2:
        return None
    low, _, high = quantiles(rates, n=4, method="inclusive")
    return Speed(median(rates), low, high, len(rates))


def _last_validation(directory: RunDirectory) -> float | None:
    validations = [record for record in read_lines(directory.metrics) if "validation_loss" in record]
    return number(validations[-1], "validation_loss") if validations else None


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
    return f"too few steps to measure the speed: {result.steps}, at least {WARM_UP_STEPS + 2} needed"


def write_results(
    folder: SweepFolder, results: Sequence[TrialResult], skipped: Sequence[ValidatedPoint], metric: Metric
) -> None:
    """Write results.csv by an atomic rename: ranked trials, then the others, then the skipped points."""
    order = rank_results(results, metric)
    ranks = {result.number: place for place, result in enumerate(order, 1)}
    others = sorted((result for result in results if result.number not in ranks), key=lambda result: result.number)
    keys = list((results[0] if results else skipped[0]).values) if results or skipped else []
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["rank", "trial", "state", *keys, *_COLUMNS])
    for result in [*order, *others]:
        values = [result.values[key] for key in keys]
        place = ranks.get(result.number, "")
        writer.writerow([place, result.number, result.state, *values, *_figures(result, folder, metric)])
    for point in skipped:
        values = [point.values[key] for key in keys]
        blanks = [""] * (len(_COLUMNS) - 1)
        writer.writerow(["", point.number, "skipped", *values, *blanks, point.reason])
    write_file_atomically(folder.results, text.getvalue())


def _figures(result: TrialResult, folder: SweepFolder, metric: Metric) -> list[object]:
    speed = result.speed
    rates = [round(rate, 3) for rate in (speed.median, speed.low, speed.high)] if speed else ["", "", ""]
    losses = ["" if loss is None else loss for loss in (result.loss, result.validation_loss)]
    code = "" if result.exit_code is None else result.exit_code
    end = [result.steps, round(result.seconds, 3), folder.trial(result.number).root, unranked_reason(result, metric)]
    return [code, *rates, speed.steps if speed else 0, *losses, *end]


def draw_results(folder: SweepFolder, results: Sequence[TrialResult], metric: Metric) -> Path | None:
    """Draw the ranked trials as bars; None when there are none. Raises ImportError without matplotlib."""
    order = rank_results(results, metric)[:_BARS]
    if not order:
        return None
    # The object interface draws without a window system and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.36 * len(order)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    scores = [result.score(metric) or 0.0 for result in order]
    spread = None
    if metric == "tokens_per_second":
        speeds = [result.speed for result in order if result.speed]
        spread = [[speed.median - speed.low for speed in speeds], [speed.high - speed.median for speed in speeds]]
    colors = ["tab:green", *["tab:blue"] * (len(order) - 1)]
    axes.barh(range(len(order)), scores, xerr=spread, color=colors, capsize=3)
    labels = [" ".join(f"{key.rpartition('.')[2]}={value}" for key, value in r.values.items()) for r in order]
    axes.set_yticks(range(len(order)), [f"{r.number}: {text}" for r, text in zip(order, labels, strict=True)])
    axes.invert_yaxis()
    if metric in LOWER_IS_BETTER:
        margin = max(scores) - min(scores) or 0.1
        axes.set_xlim(min(scores) - margin, max(scores) + 0.2 * margin)
    names = {
        "tokens_per_second": "tokens/s, median and interquartile range after warm-up",
        "validation_loss": "loss (nats)",
    }
    names["loss"] = "last training loss (nats)"
    axes.set(xlabel=names[metric], title=f"{folder.root.name}: {metric.replace('_', ' ')}")
    axes.grid(axis="x", alpha=0.3)
    with atomic_file(folder.plot) as file:
        figure.savefig(file, format="png", dpi=120)
    return folder.plot
