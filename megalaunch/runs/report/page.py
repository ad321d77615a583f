"""Assemble the report: charts and tables of one run or several, rendered by the template beside this file."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from megalaunch.format.numbers import format_bytes, format_count, format_duration, format_loss, format_memory
from megalaunch.launch.run_state import number
from megalaunch.plan.findings import as_override
from megalaunch.rundir.metrics import task_scores, validation_losses
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.catalog.compare import RunComparison, compare_runs
from megalaunch.runs.catalog.local_checkpoints import LocalCheckpointInfo
from megalaunch.runs.report import charts
from megalaunch.runs.report.charts import Chart
from megalaunch.runs.report.content import RunContent
from megalaunch.runs.report.importance import axis_places, independent_settings, setting_importance
from megalaunch.runs.report.timeline import Launch, phase_seconds
from megalaunch.runs.sweep.folder import LOWER_IS_BETTER, Metric
from megalaunch.version import __version__

Table = Sequence[tuple[str, ...]]
_LATEST_MARKS = 200


@dataclass(frozen=True)
class RunSection:
    """The part of the page about one run. `facts`: name and value; `marks`: time, kind and sentence."""

    content: RunContent
    facts: Table
    charts: list[Chart]
    phases: Table
    launches: Table
    marks: Table


@dataclass(frozen=True)
class Comparison:
    """The part of the page about several runs. `importance` is None where it cannot be estimated."""

    settings: Table
    figures: Table
    charts: list[Chart]
    metric: str
    importance: Table | None


def render_report(title: str, contents: Sequence[RunContent], metric: Metric, live: bool = False) -> str:
    """Return the page as HTML that needs no other file and loads nothing from a network.

    Every text from a run directory is escaped. Raises ImportError without matplotlib or Jinja2.

    Args:
        metric: ranks several runs.
        live: the page has the script that asks its server for the page again.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
        policy=content_security_policy(live),
        script=_live_script() if live else "",
        comparison=_compare(contents, metric) if len(contents) > 1 else None,
        sections=[_section(content) for content in contents],
    )


def content_security_policy(live: bool) -> str:
    """Return the policy of a page: nothing is loaded; a live page runs its own script, which may ask its server."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if not live:
        return policy
    digest = base64.b64encode(hashlib.sha256(_live_script().encode()).digest()).decode()
    return f"{policy}; script-src 'sha256-{digest}'; connect-src 'self'"


@functools.cache
def _live_script() -> str:
    return files(__package__).joinpath("live.js").read_text(encoding="utf-8")


def _section(run: RunContent) -> RunSection:
    drawn = [charts.loss_chart([run])] if run.steps else []
    drawn += [
        chart
        for chart in (
            charts.tasks_chart(run),
            charts.metric_chart([run], "Learning rate", {"learning_rate": "learning rate"}, "learning rate"),
            charts.metric_chart([run], "Gradient norm", {"grad_norm": "gradient norm"}, "norm"),
            charts.metric_chart([run], "Throughput", {"tokens_per_second": "tokens/s"}, "tokens/s, all devices"),
            charts.metric_chart(
                [run], "Step time", {"step_seconds": "step", "data_seconds": "of it waiting for data"}, "seconds"
            ),
            charts.metric_chart([run], "Memory", {"memory_bytes": "memory"}, "GiB, largest rank", 2**30),
            charts.timeline_chart(run.launches),
            charts.experts_chart(run),
        )
        if chart is not None
    ]
    total = sum(seconds for _, seconds in phase_seconds(run.launches))
    phases = [
        (name, format_duration(seconds), f"{seconds / total:.0%}" if total else "-")
        for name, seconds in phase_seconds(run.launches)
    ]
    return RunSection(run, _facts(run), drawn, phases, _launch_rows(run.launches), _mark_rows(run.launches))


def _facts(run: RunContent) -> Table:
    figures, state = run.summary.figures, run.summary.state
    memory = max((number(record, "memory_bytes") for record in run.steps), default=float("nan"))
    named = validation_losses(run.validations[-1]) if run.validations else {}
    scores = task_scores(run.evaluations[-1]) if run.evaluations else {}
    restarts = sum(mark.kind == "restart" for launch in run.launches for mark in launch.marks)
    facts = [
        ("state", f"{state}: {run.summary.reason}" if run.summary.reason else state),
        ("step", f"{format_count(figures.step)} of {format_count(run.spec.train.steps)}"),
        ("training loss", _or_dash(figures.loss, format_loss)),
        ("validation loss", _or_dash(figures.validation_loss, format_loss)),
        *((f"validation loss, {name}", format_loss(loss)) for name, loss in named.items() if name),
        *((name, f"{score:.4f}") for name, score in scores.items()),
        ("tokens", _or_dash(figures.tokens, format_count)),
        ("tokens/s, median", _or_dash(figures.tokens_per_second, format_count)),
        ("MFU", _or_dash(run.mfu, lambda value: f"{value:.1%}")),
        ("memory", format_memory(memory)),
        ("model", run.spec.model.name),
        ("launches", str(len(run.launches))),
        ("restarts", str(restarts)),
        ("checkpoints", ", ".join(f"step {step} ({format_bytes(size)})" for step, size in run.checkpoints) or "-"),
        *([("local checkpoints", ", ".join(map(_local_text, run.local_checkpoints)))] if run.local_checkpoints else ()),
        ("directory", str(run.summary.path)),
    ]
    return facts


def _local_text(one: LocalCheckpointInfo) -> str:
    size = format_bytes(one.size)
    return f"step {one.step} of node {one.node} {one.place} ({size}{f', {one.problem}' if one.problem else ''})"


def _launch_rows(launches: Sequence[Launch]) -> Table:
    return [
        (
            str(index),
            _clock(launch.start),
            format_duration(launch.end - launch.start),
            " ".join(launch.overrides),
            launch.outcome,
        )
        for index, launch in enumerate(launches, 1)
    ]


def _mark_rows(launches: Sequence[Launch]) -> Table:
    marks = [mark for launch in launches for mark in launch.marks]
    return [(_clock(mark.time), mark.kind, mark.message) for mark in marks[-_LATEST_MARKS:]]


def _compare(runs: Sequence[RunContent], metric: Metric) -> Comparison:
    found = compare_runs([RunDirectory(run.summary.path) for run in runs], [run.spec for run in runs])
    with_steps = [run for run in runs if run.steps]
    drawn = [charts.loss_chart(with_steps), charts.loss_chart(with_steps, "tokens")] if with_steps else []
    for title, key, unit in (
        ("Throughput", "tokens_per_second", "tokens/s"),
        ("Gradient norm", "grad_norm", "norm"),
        ("Memory", "memory_bytes", "GiB"),
    ):
        per_unit = 2.0**30 if unit == "GiB" else 1.0
        chart = charts.metric_chart(with_steps, title, {key: title.lower()}, unit, per_unit)
        drawn += [chart] if chart is not None else []
    scored = [(index, score) for index, run in enumerate(runs) if (score := _score(run, metric)) is not None]
    typed = {setting.key for run in runs for setting in run.settings if setting.origin == "command line"}
    varied = [(key, [values[index] for index, _ in scored]) for key, values in found.settings]
    settings = independent_settings(varied, typed)
    scores = [score for _, score in scored]
    importance = None
    if settings and len(scores) >= 3:
        axes = [(key, *axis_places(values)) for key, values in settings]
        drawn.append(charts.parallel_coordinates(axes, scores, metric.replace("_", " ")))
        lower = scores if metric in LOWER_IS_BETTER else [-score for score in scores]
        importance = setting_importance(settings, lower)
    return Comparison(
        settings=[(key, *map(as_override, values)) for key, values in found.settings],
        figures=_figure_rows(runs, found, metric),
        charts=drawn,
        metric=metric.replace("_", " "),
        importance=None if importance is None else [(key, f"{share:.0%}") for key, share in importance],
    )


def _figure_rows(runs: Sequence[RunContent], found: RunComparison, metric: Metric) -> Table:
    """Return the headings and a row a run, the best by the metric first."""
    rows = []
    for index in sorted(range(len(runs)), key=lambda index: _rank(runs[index], metric)):
        run, best = runs[index], found.best_losses[index]
        figures = run.summary.figures
        common = found.common_losses[index] if found.common_step is not None else None
        rows.append(
            (
                run.name,
                run.summary.state,
                format_count(figures.step),
                _or_dash(figures.loss, format_loss),
                _or_dash(figures.validation_loss, format_loss),
                _or_dash(best, format_loss),
                _or_dash(common, format_loss),
                _or_dash(figures.tokens_per_second, format_count),
            )
        )
    heading = "validation loss, common step" + ("" if found.common_step is None else f" {found.common_step}")
    names = (
        "run",
        "state",
        "step",
        "training loss",
        "validation loss",
        "lowest validation loss",
        heading,
        "tokens/s, median",
    )
    return [names, *rows]


def _score(run: RunContent, metric: Metric) -> float | None:
    figures = run.summary.figures
    value = {
        "validation_loss": figures.validation_loss,
        "loss": figures.loss,
        "tokens_per_second": figures.tokens_per_second,
    }[metric]
    return value if value is not None and math.isfinite(value) else None


def _rank(run: RunContent, metric: Metric) -> float:
    """Return what sorts runs from the best to the worst; those without a score come last."""
    score = _score(run, metric)
    if score is None:
        return math.inf
    return score if metric in LOWER_IS_BETTER else -score


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _or_dash(value: float | None, form: Any) -> str:
    return "-" if value is None else str(form(value))
