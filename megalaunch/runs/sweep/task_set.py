"""The trials of a sweep as independent tasks of its launcher: each is `megalaunch sweep --trial N` on one node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megalaunch.launchers.tasks import TaskSet
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.kubernetes import device_resource
from megalaunch.rundir.outcome import ExitCode
from megalaunch.runs.errors import fail
from megalaunch.runs.sweep.folder import record_started
from megalaunch.runs.sweep.plan import PlannedSweep, Request
from megalaunch.runs.sweep.results import is_due
from megalaunch.runs.task_set import TaskProgress, run_tasks


def trial_tasks(planned: PlannedSweep) -> TaskSet:
    """Return the trials that have not run, and the sweep itself as their final command, which ranks them."""
    request, first = planned.request, planned.runnable[0].spec
    assert first is not None, "only valid points run"
    chip = CHIPS.get(first.platform.chip)
    on_cpu = chip is not None and chip.device == "cpu"
    own = _arguments(request)
    return TaskSet(
        name=f"sweep-{request.name}",
        before=("sweep", "--trial"),
        after=own,
        numbers=tuple(point.number for point in planned.runnable if is_due(planned, point)),
        final=("sweep", *own),
        directory=request.folder.root.absolute(),
        working_directory=Path.cwd(),
        settings=first.launcher,
        devices_per_node=0 if on_cpu else int(first.cluster.devices_per_node),
        device_resource=device_resource(chip) if chip is not None else "",
    )


def run_trials_elsewhere(planned: PlannedSweep, detach: bool, note: Callable[[str], None]) -> None:
    """Run all trials by the launcher; returns when all have ended, and the ranking is due here.

    Where a scheduler has submitted them, the ranking is its final job, and the command ends with its exit code.
    """
    folder = planned.request.folder
    tasks = trial_tasks(planned)
    for point in planned.runnable:
        record_started(folder, point.number, point.values)
    before = _stamp(folder.results)
    progress = TaskProgress(
        complete=lambda: sum(not is_due(planned, point) for point in planned.runnable),
        finished=lambda: _stamp(folder.results) != before,
        kind="trial",
    )
    failed = run_tasks(tasks, detach, progress, note)
    if failed is not None:
        _refuse_unfinished(failed.number, failed.exit_code)


def _refuse_unfinished(number: int, code: int) -> NoReturn:
    known = ExitCode(code) if code in set(ExitCode) else ExitCode.CRASH
    fail(f"trial {number} has no outcome (exit code {code})\nfix:  the same command continues the sweep", known)


def _arguments(request: Request) -> tuple[str, ...]:
    """Return the arguments of the sweep; a failed trial that was asked for again is a task, and not tried once more."""
    trials = () if request.trials is None else ("--trials", str(request.trials))
    named = ("--name", request.name, "--sampler", request.sampler, "--metric", request.metric)
    return (*request.overrides.typed, *named, "--seed", str(request.seed), *trials)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino
