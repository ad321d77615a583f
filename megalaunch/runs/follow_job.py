"""Show a run that a job computes elsewhere, from the files of its directory and the state of the job."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from megalaunch.format.paths import display_path
from megalaunch.launchers.launcher import JobStatus, Launcher, LauncherError
from megalaunch.rundir.outcome import ExitCode, read_outcome
from megalaunch.runs.errors import fail

if TYPE_CHECKING:
    from megalaunch.launch.run_state import RunState
    from megalaunch.launch.stop import StopSignals
    from megalaunch.launch.supervise import Display
    from megalaunch.launchers.record import JobRecord
    from megalaunch.rundir.outcome import Outcome
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.schema import RunSpec

_DRAW_SECONDS = 0.5
_ASK_SECONDS = 5.0  # between two questions to a scheduler, whose controller serves all users
_MOST_SECONDS = 30.0
_SOON_SECONDS = 1.0  # after the outcome of the run is written
_SILENT_SECONDS = 600.0  # a scheduler that does not answer for so long ends the display
_OUTPUT_LINES = 12
_RESUMABLE = ("CANCELLED", "PREEMPTED", "DELETED")
_WILL_NOT_START = ("DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin", "BadConstraints", "PartitionTimeLimit")


class JobView:
    """A run as its directory shows it, from before its job was submitted: an older outcome is not the job's."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, submitted: float | None = None) -> None:
        """Read what the run has so far.

        Args:
            submitted: when the job was, in seconds since 1970, so that a later outcome is its own; None: it will be.
        """
        from megalaunch.launch.run_state import RunState, throughput_basis

        self.spec, self.directory = spec, directory
        is_submitted = submitted is not None
        self.state: RunState = RunState(spec, directory, throughput_basis(spec), attach=is_submitted)
        self._since = submitted or 0.0
        self._before = None if is_submitted else self._stamp()

    def outcome(self) -> Outcome | None:
        """Return the outcome that the job wrote; None without one."""
        return read_outcome(self.directory.outcome, self._since) if self._stamp() != self._before else None

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = self.directory.outcome.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino


@dataclass
class _Questions:
    """When to ask for the state of a job: rarely while nothing changes, soon after the outcome of the run."""

    next: float = 0.0
    pause: float = _ASK_SECONDS
    answered: float = 0.0

    def asked(self, changed: bool, now: float) -> None:
        """Choose the time of the next question."""
        self.pause = _ASK_SECONDS if changed else min(_MOST_SECONDS, self.pause * 1.5)
        self.next, self.answered = now + self.pause, now

    def failed(self, now: float) -> None:
        """Ask again later."""
        self.next = now + self.pause


def follow_job(view: JobView, launcher: Launcher, record: JobRecord, stop: StopSignals) -> JobStatus:
    """Show a run until its job has ended; return the last state of the job.

    A stop signal ends the display alone; where the job is attached to this process, the job too.
    """
    from megalaunch.launch.display.open_display import open_display
    from megalaunch.launch.stop import StopBeforeLaunch

    display = open_display(view.state)
    stop.watching = launcher.attached
    try:
        return _follow(view, launcher, record, stop, display)
    except StopBeforeLaunch as stopped:
        display.close()
        where = shlex.quote(display_path(view.directory.root))
        typer.echo(f"job {record.id} continues; `megalaunch watch {where}` shows it, `megalaunch stop {where}` ends it")
        raise typer.Exit(int(stopped.exit_code)) from None
    finally:
        display.close()


def _follow(view: JobView, launcher: Launcher, record: JobRecord, stop: StopSignals, display: Display) -> JobStatus:
    status, questions, stopped = JobStatus("pending", "submitted"), _Questions(answered=time.monotonic()), 0
    while True:
        now = time.monotonic()
        if now >= questions.next or launcher.attached:
            newest = _ask(launcher, record, questions, display, now)
            if newest is not None:
                _say_change(status, newest, record, view.state, display)
                questions.asked(newest != status, now)
                status = newest
        if stop.count > stopped:
            stopped = stop.count
            display.say(launcher.stop(record, at_once=stopped > 1))
        if not view.directory.events.exists():
            for line in launcher.new_lines(record):
                display.say(line)
        view.state.refresh()
        display.update(view.state)
        if status.phase in ("ended", "forgotten"):
            return status
        if view.outcome() is not None:
            questions.next = min(questions.next, now + _SOON_SECONDS)
        time.sleep(_DRAW_SECONDS)


def _ask(
    launcher: Launcher, record: JobRecord, questions: _Questions, display: Display, now: float
) -> JobStatus | None:
    """Return the state of the job; None while its scheduler does not answer, whose failures are shown."""
    try:
        return launcher.status(record)
    except LauncherError as error:
        if now - questions.answered > _SILENT_SECONDS:
            display.close()
            fail(f"the state of job {record.id} is unknown: {error.text()}", ExitCode.CRASH)
        display.say(f"the state of job {record.id} is unknown: {error}")
        questions.failed(now)
        return None


def _say_change(old: JobStatus, new: JobStatus, record: JobRecord, state: RunState, display: Display) -> None:
    if new == old:
        return
    display.say(f"job {record.id}: {new}")
    if new.phase == "pending":
        state.phase, state.stepping = f"waiting for job {record.id}: {new}", False
        if new.reason in _WILL_NOT_START:
            display.say(f"job {record.id} does not start by itself in this state: {new.reason}")
    elif old.phase == "pending" and new.phase == "running" and not state.stepping:
        state.phase = "starting"


def print_end(view: JobView, launcher: Launcher, record: JobRecord, status: JobStatus) -> ExitCode:
    """Print how the run of a job that has ended stands; return its exit code."""
    from megalaunch.launch.agent import last_lines

    outcome = view.outcome()
    if outcome is not None:
        return print_outcome(view.spec, view.directory, outcome)
    if status.exit_code == 0:  # its run directory is not seen here
        typer.echo(f"job {record.id} has ended: {status}")
        return ExitCode.DONE
    typer.echo(f"job {record.id} ended without an outcome of the run: {status}", err=True)
    for path in launcher.output(record):
        typer.echo(f"  log     {display_path(path)}", err=True)
        for line in last_lines(path, _OUTPUT_LINES):
            typer.echo(f"  | {line}", err=True)
    typer.echo("  next    the same train command continues the run from its newest checkpoint", err=True)
    if status.exit_code in list(ExitCode):
        return ExitCode(status.exit_code)
    return ExitCode.PREEMPTED if status.state.startswith(_RESUMABLE) else ExitCode.CRASH


def print_outcome(spec: RunSpec, directory: RunDirectory, outcome: Outcome) -> ExitCode:
    """Print the summary of a run and, unless it is done, its failure; return its exit code."""
    from megalaunch.launch.display.report import failure_report
    from megalaunch.launch.display.summary import run_summary
    from megalaunch.launch.supervise import LaunchResult

    for line in run_summary(spec, directory, outcome):
        typer.echo(line)
    for line in failure_report(spec, directory, LaunchResult(outcome)):
        typer.echo(line, err=True)
    return ExitCode(outcome.exit_code) if outcome.exit_code in list(ExitCode) else ExitCode.CRASH
