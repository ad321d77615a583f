"""Compare runs: the settings in which they differ, and their figures at their ends and at their last common step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.catalog.summarize import RunFigures, run_figures, validation_losses
from megalaunch.schema import RunSpec
from megalaunch.schema.build import leaves
from megalaunch.schema.paths import value_at

_NAMES = ("run.name", "run.directory")


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side; every inner tuple has a value per run, in the order of the runs.

    `settings`: (key, values) of each key whose values differ, in the order of the schema, names omitted.
    `common_step`: the last step at which every run has a validation loss, None without one;
    `common_losses`: the validation losses there. `best_losses`: the lowest validation loss of each run.
    """

    settings: tuple[tuple[str, tuple[Any, ...]], ...]
    figures: tuple[RunFigures, ...]
    best_losses: tuple[float | None, ...]
    common_step: int | None
    common_losses: tuple[float, ...]


def compare_runs(runs: Sequence[RunDirectory], specs: Sequence[RunSpec]) -> RunComparison:
    """Compare at least two runs by their specs and all of their metrics."""
    validations = [validation_losses(run) for run in runs]
    common = set.intersection(*(set(losses) for losses in validations))
    step = max(common, default=None)
    return RunComparison(
        settings=tuple(_differing_settings(specs)),
        figures=tuple(run_figures(read_lines(run.metrics)) for run in runs),
        best_losses=tuple(min(losses.values(), default=None) for losses in validations),
        common_step=step,
        common_losses=() if step is None else tuple(losses[step] for losses in validations),
    )


def _differing_settings(specs: Sequence[RunSpec]) -> list[tuple[str, tuple[Any, ...]]]:
    found = []
    for path, _, _ in leaves(RunSpec):
        values = tuple(value_at(spec, path) for spec in specs)
        if path not in _NAMES and any(value != values[0] for value in values):
            found.append((path, values))
    return found
