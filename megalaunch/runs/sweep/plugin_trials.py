"""Run a sweep's trials by a launcher plug-in of Hydra (`hydra/launcher=joblib`), each as `megalaunch train`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megalaunch.runs.sweep.folder import record_started
from megalaunch.runs.sweep.plan import PlannedSweep, ValidatedPoint
from megalaunch.runs.sweep.results import is_due

_KEY = "hydra/launcher"
_OWN = "basic"  # Hydra's default: the trials run here, one after the other


@dataclass(frozen=True)
class Job:
    """A trial for a worker of the plug-in: the arguments of `megalaunch train`, and the file for what it prints."""

    arguments: tuple[str, ...]
    log: Path


def names_plugin(overrides: Sequence[str]) -> bool:
    """Return whether the overrides choose a launcher plug-in."""
    return any(
        key.lstrip("+") == _KEY and value != _OWN for key, _, value in (text.partition("=") for text in overrides)
    )


def run_by_plugin(planned: PlannedSweep) -> None:
    """Run the trials that have not run; raises HydraException if the plug-in cannot be used."""
    from megalaunch.config.compose import with_hydra
    from megalaunch.config.hydra.launcher import launch_jobs

    request, folder = planned.request, planned.request.folder
    points = [point for point in planned.runnable if is_due(planned, point)]
    jobs = [_job(planned, point) for point in points]
    for point in points:
        record_started(folder, point.number, point.values)
    shared = [text for text in request.overrides.typed if text.partition("=")[0] not in request.overrides.axes]
    axes = [[f"{key}={value}" for key, value in point.values.items()] for point in points]
    with_hydra(
        shared, lambda nodes, texts: launch_jobs(nodes, texts, axes, partial(run_job, jobs), folder.root / "hydra")
    )


def run_job(jobs: Sequence[Job], number: int) -> int:
    """Run one trial in a process of its own; return its exit code."""
    job = jobs[number]
    with job.log.open("ab") as log:
        command = [sys.executable, "-m", "megalaunch", "train", *job.arguments]
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def _job(planned: PlannedSweep, point: ValidatedPoint) -> Job:
    assert point.composition is not None, "only valid points run"
    own = [text for text in point.composition.overrides if not text.lstrip("+~").startswith("hydra")]
    return Job(tuple(own), planned.request.folder.root.resolve() / f"trial_{point.number:04d}.log")
