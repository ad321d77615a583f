"""Format runs as lines: their list, their comparison, and what a cleaning removes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megalaunch.format.numbers import format_bytes, format_count, format_loss
from megalaunch.format.table import table_lines
from megalaunch.plan.findings import as_override
from megalaunch.runs.catalog.clean import RunCleaning
from megalaunch.runs.catalog.compare import RunComparison
from megalaunch.runs.catalog.summarize import RunSummary


def list_lines(folder: Path, summaries: Sequence[RunSummary]) -> Iterator[str]:
    """Yield the list of the runs of a folder, newest last, and the reasons of those that failed."""
    total = format_bytes(sum(one.size for one in summaries))
    yield f"{folder}: {len(summaries)} run{'s' if len(summaries) != 1 else ''}, {total}"
    if not summaries:
        return
    ordered = sorted(summaries, key=lambda one: one.changed)
    table = [("run", "state", "step", "loss", "validation", "median tokens/s", "size", "changed", "model")]
    for one in ordered:
        figures = one.figures
        table.append(
            (
                _name(one.path, folder),
                one.state,
                f"{figures.step}/{one.steps or '?'}",
                _format(format_loss, figures.loss),
                _format(format_loss, figures.validation_loss),
                _format(format_count, figures.tokens_per_second),
                format_bytes(one.size),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(one.changed)),
                one.model or "",
            )
        )
    yield from table_lines(table, right=(2, 3, 4, 5, 6))
    for one in ordered:
        if one.reason:
            yield f"  {_name(one.path, folder)}: {one.reason}"
        if one.local_size:
            yield f"  {_name(one.path, folder)}: {format_bytes(one.local_size)} of local checkpoints on this machine"


def comparison_lines(paths: Sequence[Path], found: RunComparison) -> Iterator[str]:
    """Yield the settings in which runs differ, then their figures, a column per run."""
    names = [str(path) for path in paths]
    if found.settings:
        rows = [("setting", *names), *((key, *map(as_override, values)) for key, values in found.settings)]
        yield from table_lines(rows, indent=0)
    else:
        yield "The settings are the same."
    yield ""
    columns = tuple(range(1, len(names) + 1))
    yield from table_lines([("figure", *names), *_figure_rows(found)], right=columns, indent=0)


def _figure_rows(found: RunComparison) -> Iterator[tuple[str, ...]]:
    figures = found.figures
    yield ("last step", *(str(one.step) for one in figures))
    yield ("tokens", *(_format(format_count, one.tokens) for one in figures))
    yield ("training loss", *(_format(format_loss, one.loss) for one in figures))
    yield ("validation loss, last", *(_format(format_loss, one.validation_loss) for one in figures))
    yield ("validation loss, lowest", *(_format(format_loss, value) for value in found.best_losses))
    if found.common_step is not None:
        yield (f"validation loss, step {found.common_step}", *map(format_loss, found.common_losses))
    yield ("tokens/s, median", *(_format(format_count, one.tokens_per_second) for one in figures))


def cleaning_rows(planned: Sequence[RunCleaning]) -> list[dict[str, Any]]:
    """Return the directories that a cleaning removes, as plain JSON."""
    return [
        {"path": str(removal.path), "bytes": removal.size, "reason": removal.reason}
        for cleaning in planned
        for removal in cleaning.removals
    ]


def cleaning_lines(planned: Sequence[RunCleaning], removed: bool) -> Iterator[str]:
    """Yield what a cleaning removes or, without --yes, would remove."""
    rows = cleaning_rows(planned)
    if rows:
        table = [(row["path"], format_bytes(row["bytes"]), row["reason"]) for row in rows]
        yield from table_lines(table, right=(1,))
    for cleaning in planned:
        if cleaning.running:
            yield f"  {cleaning.run.root}: is running, not touched"
    total = format_bytes(sum(row["bytes"] for row in rows))
    things = f"{len(rows)} director{'y' if len(rows) == 1 else 'ies'}, {total}"
    if not rows:
        yield "There is nothing to remove."
    elif removed:
        yield f"removed: {things}"
    else:
        yield f"{things} would be removed; nothing was. Add --yes to remove."


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path != folder else str(path)


def _format(form: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else form(value)
