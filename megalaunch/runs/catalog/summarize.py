"""Summarise a run from the files of its directory: how far it is, how it ended, and its figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from megalaunch.launch.directory import run_is_locked
from megalaunch.launch.run_state import number
from megalaunch.rundir.jsonl import Record, read_last_lines, read_lines
from megalaunch.rundir.outcome import ExitCode, Outcome, read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.catalog.local_checkpoints import local_checkpoints
from megalaunch.schema import RunSpec, SpecError
from megalaunch.schema.spec_file import read_spec

State = Literal["running", "finished", "stopped", "failed", "ended", "new", "unreadable"]
"""`ended`: its launcher died without an outcome. `new`: never launched, or no step was finished."""

_AVERAGED_STEPS = 20
_TAIL_BYTES = 1 << 20  # some 3,000 steps: enough for the newest figures of a run of any length
_STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class RunFigures:
    """Figures from metrics.jsonl; None where the run has none yet.

    `loss` is the mean of the last 20 steps, `validation_loss` the newest, `tokens` the number seen so far,
    `tokens_per_second` the median over steps.
    """

    step: int = 0
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class RunSummary:
    """One run. `steps` is train.steps; `size` counts the bytes of all files; `changed` is in seconds since 1970.

    `local_size` counts those of local checkpoints in the memory and on the disk of this machine.
    `reason` says why a run failed or cannot be read, "" otherwise.
    """

    path: Path
    state: State
    reason: str
    model: str | None
    steps: int | None
    figures: RunFigures
    size: int
    local_size: int
    changed: float


def summarize_run(directory: RunDirectory) -> RunSummary:
    """Summarise a run, from the end of its metrics; a run that cannot be read has the state `unreadable`."""
    spec, problem = _read_spec(directory)
    figures = run_figures(read_last_lines(directory.metrics, _TAIL_BYTES))
    state, reason = _state(directory, spec, figures, read_outcome(directory.outcome))
    size, changed = _measure_files(directory.root)
    return RunSummary(
        path=directory.root,
        state=state if spec is not None else "unreadable",
        reason=problem or reason,
        model=spec.model.name if spec else None,
        steps=spec.train.steps if spec else None,
        figures=figures,
        size=size,
        local_size=sum(one.size for one in local_checkpoints(directory, spec)) if spec is not None else 0,
        changed=changed,
    )


def run_figures(records: Iterable[Record]) -> RunFigures:
    """Return the figures of the lines of a metrics.jsonl, or of its end."""
    steps: list[Record] = []
    validation_loss = None
    for record in records:
        if "loss" in record:
            steps.append(record)
        validation_loss = record.get("validation_loss", validation_loss)
    if not steps:
        return RunFigures(validation_loss=validation_loss)
    rates = [record["tokens_per_second"] for record in steps if record.get("tokens_per_second")]
    return RunFigures(
        step=steps[-1]["step"],
        tokens=steps[-1].get("tokens"),
        loss=fmean(number(record, "loss") for record in steps[-_AVERAGED_STEPS:]),
        validation_loss=validation_loss,
        tokens_per_second=median(rates) if rates else None,
    )


def validation_losses(directory: RunDirectory) -> dict[int, float]:
    """Return every validation loss of a run by step."""
    return {
        record["step"]: record["validation_loss"]
        for record in read_lines(directory.metrics)
        if record.get("validation_loss") is not None
    }


def _read_spec(directory: RunDirectory) -> tuple[RunSpec | None, str]:
    """Return the spec, or None and the first line of the reason."""
    try:
        return read_spec(directory.spec), ""
    except (SpecError, OSError) as error:
        return None, str(error).strip().splitlines()[0]


def _state(
    directory: RunDirectory, spec: RunSpec | None, figures: RunFigures, outcome: Outcome | None
) -> tuple[State, str]:
    if run_is_locked(directory):
        return "running", ""
    if outcome is None:
        return ("ended", "") if figures.step else ("new", "")
    if outcome.exit_code in _STOPPED:
        return "stopped", ""
    if outcome.exit_code != ExitCode.DONE:
        return "failed", outcome.reason
    done = spec is None or outcome.step >= spec.train.steps or outcome.details.get("early_stopped")
    return ("finished" if done else "stopped"), ""


def _measure_files(root: Path) -> tuple[int, float]:
    """Return the bytes of all files below a directory, and the newest change; a file that vanishes is skipped."""
    size, changed = 0, 0.0
    for path in root.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        if path.is_file():
            size += status.st_size
            changed = max(changed, status.st_mtime)
    return size, changed
