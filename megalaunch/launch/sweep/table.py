"""Write results.csv and results.png: every point of a sweep, the best first."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megalaunch.config.search_space import Values
from megalaunch.launch.sweep.directory import LOWER_IS_BETTER, Metric, SweepFolder
from megalaunch.launch.sweep.result import TrialResult, rank_results, unranked_reason
from megalaunch.rundir.atomic_file import atomic_file, write_file_atomically

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


class SkippedPoint(Protocol):
    """A point that cannot run."""

    @property
    def number(self) -> int:
        """Its number in the sweep."""
        ...

    @property
    def values(self) -> Values:
        """Its value on each axis."""
        ...

    @property
    def reason(self) -> str:
        """Why it cannot run, in one line."""
        ...


def write_results(
    folder: SweepFolder, results: Sequence[TrialResult], left_out: Sequence[SkippedPoint], metric: Metric
) -> None:
    """Write results.csv by an atomic rename: ranked trials, then the others, then the skipped points."""
    order = rank_results(results, metric)
    ranks = {result.number: place for place, result in enumerate(order, 1)}
    others = sorted((result for result in results if result.number not in ranks), key=lambda result: result.number)
    keys = list((results[0] if results else left_out[0]).values) if results or left_out else []
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["rank", "trial", "state", *keys, *_COLUMNS])
    for result in [*order, *others]:
        values = [result.values[key] for key in keys]
        place = ranks.get(result.number, "")
        writer.writerow([place, result.number, result.state, *values, *_figures(result, folder, metric)])
    for point in left_out:
        values = [point.values[key] for key in keys]
        blanks = [""] * (len(_COLUMNS) - 1)
        writer.writerow(["", point.number, "left out", *values, *blanks, point.reason])
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
    names = {"tokens_per_second": "tokens/s, median of steady steps and middle half", "validation_loss": "loss (nats)"}
    names["loss"] = "last training loss (nats)"
    axes.set(xlabel=names[metric], title=f"{folder.root.name}: {metric.replace('_', ' ')}")
    axes.grid(axis="x", alpha=0.3)
    with atomic_file(folder.picture) as file:
        figure.savefig(file, format="png", dpi=120)
    return folder.picture
