"""Format jobs: the lines of one, the table of many, and the JSON of both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalaunch.format.numbers import format_count, format_loss
from megalaunch.format.paths import display_path
from megalaunch.format.table import table_lines
from megalaunch.launch.run_state import number
from megalaunch.launchers.record import JobRecord
from megalaunch.rundir.jsonl import read_last_lines, read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.catalog.summarize import RunFigures, run_figures
from megalaunch.runs.job_states import RunJob

_TAIL_BYTES = 1 << 16


def status_lines(job: RunJob) -> Iterator[str]:
    """Yield what is known about the run of one job."""
    record, outcome = job.record, job.outcome
    yield display_path(job.directory.root)
    if record is not None:
        final = f", then job {record.final}" if record.tasks and record.final not in (0, record.id) else ""
        size = f"{_size(record)}{final}"
        yield _line("job", f"{record.id} of {record.launcher}, {size}, submitted {_time(record.submitted)}")
    yield _line("state", str(job.status))
    if record is not None and job.status.phase == "running" and (nodes := _fewer_nodes(job.directory, record)):
        yield _line("nodes", nodes)
    if record is None or not record.is_task_set:
        yield _line("step", _progress(_figures(job)))
    if outcome is not None:
        yield _line("outcome", f"{outcome.reason} (exit code {outcome.exit_code})")
    if record is not None:
        yield _line("output", display_path(record.output))


def list_lines(folder: Path, jobs: Sequence[RunJob]) -> Iterator[str]:
    """Yield the table of the jobs of a folder."""
    yield f"{folder}: {len(jobs)} job{'s' if len(jobs) != 1 else ''}"
    rows = [("run", "launcher", "job", "nodes", "submitted", "step", "state")]
    for job in jobs:
        record = job.record
        submitted = ("-",) * 4
        if record is not None:
            size = _size(record) if record.is_task_set else str(record.nodes)
            submitted = (record.launcher, str(record.id), size, _time(record.submitted))
        name = str(job.directory.root.relative_to(folder))
        step = "-" if record is not None and record.is_task_set else str(_figures(job).step)
        rows.append((name, *submitted, step, str(job.status)))
    if jobs:
        yield from table_lines(rows, right=(2, 3, 5))


def job_row(job: RunJob) -> dict[str, Any]:
    """Return the JSON of one job."""
    record, outcome = job.record, job.outcome
    return {
        "run": str(job.directory.root),
        "job": None if record is None else asdict(record),
        "status": asdict(job.status),
        "figures": asdict(_figures(job)),
        "outcome": None if outcome is None else asdict(outcome),
    }


def _figures(job: RunJob) -> RunFigures:
    return run_figures(read_last_lines(job.directory.metrics, _TAIL_BYTES))


def _progress(figures: RunFigures) -> str:
    parts = [str(figures.step)]
    if figures.loss is not None:
        parts.append(f"loss {format_loss(figures.loss)}")
    if figures.tokens_per_second is not None:
        parts.append(f"median {format_count(figures.tokens_per_second)} tokens/s")
    return ", ".join(parts)


def _fewer_nodes(directory: RunDirectory, record: JobRecord) -> str:
    """Return on how many of its nodes a job runs, where and why; "" if it runs on all."""
    changes = (event for event in read_lines(directory.events) if event.get("event") == "nodes_changed")
    last = next(iter(deque((event for event in changes if number(event, "time") >= record.submitted), maxlen=1)), None)
    if last is None or last.get("nodes") == last.get("wanted"):
        return ""
    return f"{last['nodes']} of {last['wanted']}, on {','.join(last['hosts'])}: {last['reason']}"


def _size(record: JobRecord) -> str:
    if record.is_task_set:
        return f"{record.tasks} task{'s' if record.tasks != 1 else ''}"
    return f"{record.nodes} node{'s' if record.nodes > 1 else ''}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _line(name: str, value: str) -> str:
    return f"  {name:<8} {value}"
