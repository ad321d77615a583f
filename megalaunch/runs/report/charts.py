"""Draw the charts of a report as SVG images in data URIs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalaunch.launch.display.plot import smooth, validation_curves
from megalaunch.launch.display.plot_experts import experts_figure
from megalaunch.launch.run_state import number
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.metrics import task_scores
from megalaunch.runs.report.content import RunContent
from megalaunch.runs.report.timeline import STARTING, Launch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_POINTS = 1000  # of a curve; more cannot be told apart on a page
_MOST_NAMED = 12  # curves; a legend of more would cover them
_PHASE_COLORS = {STARTING: "tab:gray", "training": "tab:blue", "validating": "tab:orange", "saving": "tab:green"}
_OTHER_PHASE = "tab:purple"
_MARKERS = {
    "checkpoint": ("|", "tab:green"),
    "failure": ("X", "tab:red"),
    "restart": (">", "tab:red"),
    "stop": ("s", "black"),
    "warning": ("^", "tab:olive"),
}


@dataclass(frozen=True)
class Chart:
    """An image: a title, a data URI, and the text for those who cannot see it."""

    title: str
    uri: str
    alt: str


def loss_chart(runs: Sequence[RunContent], against: str = "step") -> Chart:
    """Draw training loss (smoothed) and validation loss of every run against `step` or `tokens`."""

    def draw(axes: Any) -> None:
        for index, run in enumerate(runs):
            color = f"C{index % 10}"
            label = "training" if len(runs) == 1 else run.name
            at, losses = _column(run.steps, against), _column(run.steps, "loss")
            if len(runs) == 1:
                axes.plot(*thin(at, losses), color=color, alpha=0.3, linewidth=0.8)
            axes.plot(*thin(at, smooth(losses)), color=color, label=label)
            if run.validations:
                tokens_at = {record["step"]: number(record, "tokens") for record in run.steps}
                for order, (name, (steps, losses)) in enumerate(validation_curves(run.validations).items(), start=1):
                    places = steps if against == "step" else [tokens_at.get(int(step), math.nan) for step in steps]
                    style = {"color": f"C{order}", "label": name} if len(runs) == 1 else {"color": color}
                    axes.plot(*thin(places, losses), ls="--", marker=".", **style)
        axes.set(ylabel="loss (nats per token)", xlabel=against)
        if len(runs) <= _MOST_NAMED:
            axes.legend()

    title = "Loss" if against == "step" else f"Loss by {against}"
    note = "" if len(runs) == 1 else "; dashed lines with dots are validation losses"
    return _chart(title, f"training and validation loss{note}", draw, against)


def tasks_chart(run: RunContent) -> Chart | None:
    """Draw the scores of lm-eval tasks against the step; None if none was evaluated."""
    names = list(dict.fromkeys(name for record in run.evaluations for name in task_scores(record)))
    if not names:
        return None

    def draw(axes: Any) -> None:
        for name in names:
            scored = [record for record in run.evaluations if name in task_scores(record)]
            axes.plot(_column(scored, "step"), [task_scores(record)[name] for record in scored], marker=".", label=name)
        axes.set(ylabel="score", xlabel="step")
        if len(names) <= _MOST_NAMED:
            axes.legend()

    return _chart("lm-eval tasks", "scores of lm-eval tasks over the steps", draw)


def metric_chart(
    runs: Sequence[RunContent], title: str, keys: dict[str, str], unit: str, per_unit: float = 1.0
) -> Chart | None:
    """Draw metrics of every run, divided by `per_unit`, against the step; None if no run has any.

    `keys`: the label of each metric.
    """
    if not any(key in record for run in runs for record in run.steps[:1] for key in keys):
        return None

    def draw(axes: Any) -> None:
        for run in runs:
            for key, label in keys.items():
                name = label if len(runs) == 1 else run.name if len(keys) == 1 else f"{run.name}: {label}"
                values = [value / per_unit for value in _column(run.steps, key)]
                axes.plot(*thin(_column(run.steps, "step"), values), label=name, linewidth=0.9)
        axes.set(ylabel=unit, xlabel="step")
        if 1 < len(keys) * len(runs) <= _MOST_NAMED:
            axes.legend()

    return _chart(title, f"{' and '.join(keys.values())} over the steps", draw)


def timeline_chart(launches: Sequence[Launch]) -> Chart | None:
    """Draw the phases of each launch from its start, one row a launch, with its marks; None without launches."""
    if not launches:
        return None

    def draw(axes: Any) -> None:
        named = set[str]()
        for row, launch in enumerate(launches):
            for phase in launch.phases:
                name = phase.name if phase.name in _PHASE_COLORS else "other phases"
                label = None if name in named else name
                named.add(name)
                span = (phase.start - launch.start, max(phase.seconds, 0.0))
                color = _PHASE_COLORS.get(phase.name, _OTHER_PHASE)
                axes.broken_barh([span], (row - 0.35, 0.5), color=color, label=label, linewidth=0)
            for mark in launch.marks:
                marker, color = _MARKERS[mark.kind]
                label = None if mark.kind in named else mark.kind
                named.add(mark.kind)
                axes.plot([mark.time - launch.start], [row + 0.3], marker, color=color, label=label, linestyle="none")
        axes.set_yticks(range(len(launches)), [f"launch {row + 1}" for row in range(len(launches))])
        axes.invert_yaxis()
        axes.set(xlabel="seconds since the start of the launch")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    height = min(12.0, 1.8 + 0.4 * len(launches))
    return _chart("Timeline", f"phases and events of {len(launches)} launches", draw, height=height)


def experts_chart(run: RunContent) -> Chart | None:
    """Draw the load of the experts of a run; None without experts."""
    if run.expert_load is None or not len(run.expert_load.steps):
        return None
    figure = experts_figure(run.expert_load, "Load")
    return Chart("Experts", _data_uri(figure), "tokens of each expert over the mean, by layer and step")


def parallel_coordinates(
    axes_values: Sequence[tuple[str, Sequence[float], Sequence[tuple[float, str]]]],
    scores: Sequence[float],
    metric: str,
) -> Chart:
    """Draw one line a run through its settings to its score, coloured by the score.

    `axes_values`: for each setting its name, the place (0 to 1) of each run, and the labelled ticks.
    """

    from matplotlib import colormaps

    def draw(axes: Any) -> None:
        low, high = min(scores), max(scores)
        spread = (high - low) or 1.0
        colors = colormaps["viridis"]
        places = [
            [*column, (score - low) / spread]
            for *column, score in zip(*(v for _, v, _ in axes_values), scores, strict=True)
        ]
        for line, score in sorted(zip(places, scores, strict=True), key=lambda pair: -pair[1]):
            axes.plot(range(len(line)), line, color=colors((score - low) / spread), alpha=0.8)
        columns = [*axes_values, (metric, (), ((0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")))]
        for index, (_, _, ticks) in enumerate(columns):
            axes.axvline(index, color="0.7", linewidth=0.8)
            for place, text in ticks:
                axes.annotate(text, (index, place), xytext=(3, 0), textcoords="offset points", fontsize=7, va="center")
        axes.set_xticks(range(len(columns)), [name for name, _, _ in columns], rotation=15, ha="right")
        axes.set_yticks([])
        axes.set_xlim(-0.2, len(columns) - 0.5)
        axes.grid(visible=False)

    return _chart("Settings and results", f"the settings of each run and its {metric}", draw, height=4.0)


def thin(at: Sequence[float], values: Sequence[float], most: int = _MAX_POINTS) -> tuple[list[float], list[float]]:
    """Return at most about `most` points of a curve, with the lowest and the highest of each stretch.

    Keeps spikes, which an average or every n-th point would lose.
    """
    if len(at) <= most:
        return list(at), list(values)
    width = -(-2 * len(at) // most)
    kept: list[int] = []
    for start in range(0, len(at), width):
        stretch = range(start, min(start + width, len(at)))
        drawn = [index for index in stretch if not math.isnan(values[index])] or [start]
        kept += sorted({min(drawn, key=values.__getitem__), max(drawn, key=values.__getitem__)})
    return [at[index] for index in kept], [values[index] for index in kept]


def _chart(title: str, alt: str, draw: Callable[[Any], None], across: str = "step", height: float = 3.2) -> Chart:
    # The object interface draws without a window system and without global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    draw(axes)
    if across == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter())
    elif axes.get_xlabel() == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return Chart(title, _data_uri(figure), alt)


def _data_uri(figure: Figure) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megalaunch"}):
        FigureCanvasSVG(figure).print_figure(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def _column(records: Sequence[Record], key: str) -> list[float]:
    return [number(record, key) for record in records]
