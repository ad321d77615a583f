"""Run the independent tasks of a command by its launcher, and their final command; show submitted ones to their end."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer

from megalaunch.format.paths import display_path
from megalaunch.launch.agent import last_lines
from megalaunch.launch.background import Background, continue_in_background
from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
from megalaunch.launchers.launcher import JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord, read_record
from megalaunch.launchers.select_launcher import select_launcher, select_task_launcher
from megalaunch.launchers.tasks import FailedTask, TaskRunner, TaskScheduler, TaskSet
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.errors import fail, refuse
from megalaunch.schema.launcher import LauncherSpec

_POLL_SECONDS = 0.5
_ASK_SECONDS = 5.0  # between two questions to a scheduler, whose controller serves all users
_SILENT_SECONDS = 600.0  # a scheduler that does not answer for so long ends the display
_LINES = 12
_RESULT_LINES = 60


@dataclass(frozen=True)
class TaskProgress:
    """What the files of a command tell about its tasks.

    Attributes:
        complete: returns how many are complete.
        finished: returns whether the final command has done its work.
        kind: what a task is called: "shard".
    """

    complete: Callable[[], int]
    finished: Callable[[], bool]
    kind: str


def check_task_launcher(settings: LauncherSpec, detach: bool) -> TaskRunner | TaskScheduler:
    """Return the launcher of independent tasks; end the command if there is none.

    Args:
        detach: its tasks must live on without this process.
    """
    try:
        launcher = select_task_launcher(settings, detach)
    except LauncherError as error:
        fail(error.text())
    if detach and settings.name == "local":
        fail("--detach needs a launcher\nfix:  launcher=slurm, ssh, ray or kubernetes; or leave --detach out")
    return launcher


def print_task_manifest(tasks: TaskSet, detach: bool) -> None:
    """Print exactly what would be submitted or run; end the command on an error."""
    launcher = check_task_launcher(tasks.settings, detach)
    try:
        typer.echo(launcher.manifest(tasks), nl=False)
    except LauncherError as error:
        fail(error.text())


def run_tasks(tasks: TaskSet, detach: bool, progress: TaskProgress, note: Callable[[str], None]) -> FailedTask | None:
    """Run the tasks here, on hosts or on a Ray cluster; None if all have succeeded, and the final command is due.

    Where a scheduler has submitted them, it runs the final command too, and this command ends with its exit code.

    Args:
        detach: end the command when the tasks are submitted; on hosts and on Ray, a process in the background returns.
        note: called with each note to the user.
    """
    launcher = check_task_launcher(tasks.settings, detach)
    try:
        _refuse_second_job(tasks, launcher)
        with contextlib.suppress(OSError):
            RunDirectory(tasks.directory).outcome.unlink()  # of an earlier command
        if launcher.attached:
            return _run_attached(tasks, launcher, detach, progress, note)
        record = launcher.submit(tasks)
    except LauncherError as error:
        fail(error.text())
    except OSError as error:
        fail(f"{display_path(tasks.directory)} cannot be written ({error.strerror})")
    typer.echo(f"submitted to {record.launcher}: {_jobs(record, progress)}; output in {display_path(record.output)}")
    if detach:
        _say_next(tasks)
        raise typer.Exit(0)
    _show_to_the_end(tasks, record, progress)


def record_end(directory: Path, code: int, reason: str) -> None:
    """Write the outcome of a command with tasks, for `megalaunch status`, where their launcher has its record.

    Args:
        directory: of records and logs.
    """
    run = RunDirectory(directory)
    if run.job.exists():
        with contextlib.suppress(OSError):
            write_outcome(run.outcome, Outcome(int(code), reason, 0))


def _run_attached(
    tasks: TaskSet, launcher: TaskRunner, detach: bool, progress: TaskProgress, note: Callable[[str], None]
) -> FailedTask | None:
    """Run tasks that end with this process: it waits for their end after a stop signal too. Raises LauncherError."""
    background = continue_in_background() if detach else None
    continues = f"finished {progress.kind}s are kept; the same command continues"
    try:
        with StopSignals():
            failed = launcher.run(tasks, note, partial(_say_started, tasks, background))
    except StopBeforeLaunch as stopped:
        reason = f"interrupted; {continues}"
        record_end(tasks.directory, stopped.exit_code, reason)
        refuse(reason, stopped.exit_code)
    if failed is not None:
        record_end(tasks.directory, failed.exit_code, f"{progress.kind} {failed.number} failed; {continues}")
        if failed.log is not None:
            _print_log(failed.log)
    return failed


def _say_started(tasks: TaskSet, background: Background | None) -> None:
    """Let the command end, and continue in the background."""
    if background is not None:
        log = RunDirectory(tasks.directory).command_log
        where = f"held by process {os.getpid()} here; output in {display_path(log.parent)}"
        typer.echo(f"{tasks.settings.name}: the tasks run, {where}")
        _say_next(tasks)
        background.leave_terminal(log)


def _say_next(tasks: TaskSet) -> None:
    typer.echo(f"next: megalaunch status {shlex.quote(display_path(tasks.directory))}, logs or stop")


def _refuse_second_job(tasks: TaskSet, launcher: TaskRunner | TaskScheduler) -> None:
    """End the command if the tasks were submitted before and have not ended."""
    record = read_record(RunDirectory(tasks.directory).job)
    if record is None:
        return
    if launcher.attached and record.launcher != tasks.settings.name:
        return
    before = select_launcher(record.launcher)
    if before.attached and record.host != socket.gethostname():
        return  # whether that process lives is not known here
    status = before.status(record)
    if status.phase in ("pending", "running"):
        shown = shlex.quote(display_path(tasks.directory))
        fail(
            f"{display_path(tasks.directory)} has job {record.id} already: {status}\n"
            f"fix:  megalaunch status {shown} shows it, megalaunch stop {shown} ends it"
        )


def _show_to_the_end(tasks: TaskSet, record: JobRecord, progress: TaskProgress) -> NoReturn:
    """Print each change until the final command has ended; end with its exit code. Ctrl-C ends the display alone."""
    try:
        status = _follow(record, progress)
    except KeyboardInterrupt:
        shown = shlex.quote(display_path(tasks.directory))
        typer.echo(
            f"job {record.id} continues; `megalaunch status {shown}` shows it, `megalaunch stop {shown}` ends it"
        )
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    logs = select_launcher(record.launcher).output(record)
    if progress.finished():
        for line in last_lines(logs[-1], _RESULT_LINES) if logs else ():
            typer.echo(line)
        raise typer.Exit(0)
    typer.echo(f"job {record.final} ended without a result: {status}", err=True)
    for path in logs[-1:]:
        _print_log(path)
    typer.echo(f"  next    the same command keeps complete {progress.kind}s and continues", err=True)
    if status.exit_code in list(ExitCode) and status.exit_code:
        raise typer.Exit(int(status.exit_code))
    raise typer.Exit(int(ExitCode.PREEMPTED if status.state.startswith("CANCELLED") else ExitCode.CRASH))


def _jobs(record: JobRecord, progress: TaskProgress) -> str:
    array = f"{_counted(record.tasks, progress)} in job {record.id}"
    if record.final == record.id:
        return array if record.tasks else f"job {record.id}"
    return f"{array}, then job {record.final}"


def _counted(count: int, progress: TaskProgress) -> str:
    return f"{count} {progress.kind}{'s' if count != 1 else ''}"


def _print_log(path: Path) -> None:
    typer.echo(f"  log     {display_path(path)}", err=True)
    for line in last_lines(path, _LINES):
        typer.echo(f"  | {line}", err=True)


def _follow(record: JobRecord, progress: TaskProgress) -> JobStatus:
    """Print each change of the state and of the number of complete tasks; return the last state."""
    launcher = select_launcher(record.launcher)
    status: JobStatus | None = None
    complete, asked, answered = 0, 0.0, time.monotonic()
    while True:
        now = time.monotonic()
        if now >= asked:
            try:
                before, status = status, launcher.status(record)
                answered = now
                if status != before:
                    typer.echo(f"job {record.id}: {status}")
            except LauncherError as error:
                if now - answered > _SILENT_SECONDS:
                    fail(f"the state of job {record.id} is unknown: {error.text()}", ExitCode.CRASH)
            asked = now + _ASK_SECONDS
        if (found := progress.complete()) > complete:
            complete = found
            typer.echo(f"{_counted(complete, progress)} complete")
        if status is not None and status.phase in ("ended", "forgotten"):
            return status
        if progress.finished():
            asked = min(asked, now + 2 * _POLL_SECONDS)
        time.sleep(_POLL_SECONDS)
