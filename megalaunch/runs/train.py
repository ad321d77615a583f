"""Train a prepared run: lock its directory, prepare its data, launch the workers, report the end."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from megalaunch.format.paths import display_path
from megalaunch.installation import install_command
from megalaunch.rundir.outcome import ExitCode
from megalaunch.runs.errors import fail
from megalaunch.runs.prepare_run import command_lines, prepare_data, refuse_directory
from megalaunch.runs.required_packages import require_optional_packages

if TYPE_CHECKING:
    from megalaunch.launch.announcement import Announcement
    from megalaunch.launch.background import Background
    from megalaunch.launch.local import Launch
    from megalaunch.launch.lock import RunLock
    from megalaunch.launch.stop import StopSignals
    from megalaunch.launch.supervise import LaunchResult
    from megalaunch.platform.allocation import NodePlace
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.prepare_run import PreparedRun
    from megalaunch.schema import RunSpec


def print_commands(planned: PreparedRun) -> None:
    """Print the command of each machine's agent, or the job that would be submitted."""
    if planned.spec.launcher.name != "local" and planned.machine.allocation is None:
        from megalaunch.runs.submit import print_manifest

        print_manifest(planned)
        return
    for line in command_lines(planned):
        typer.echo(line)


def train_run(planned: PreparedRun, stop: StopSignals, prepare_only: bool, detach: bool = False) -> ExitCode:
    """Lock the run directory, prepare the data, launch the workers and report; return the exit code of the run.

    Args:
        planned: from `prepare_run`.
        prepare_only: write spec.yaml and print the commands of the agents; start nothing.
        detach: return when the job is submitted, or when the data is prepared; a run of this machine continues in
            the background.
    """
    from megalaunch.launch.announcement import Announcement
    from megalaunch.launch.background import continue_in_background
    from megalaunch.launch.directory import RunDirectoryError, unlock_run
    from megalaunch.launch.display.summary import finished_report
    from megalaunch.runs.directory_lock import lock_directory
    from megalaunch.runs.several_nodes import join_run, start_by_srun

    place = planned.place
    if detach and (prepare_only or planned.start not in ("job", "here")):
        what = "--prepare-only starts nothing" if prepare_only else "the job of this allocation holds the run"
        fail(f"{what}, so there is nothing to detach\nfix:  leave --detach out")
    if planned.decision.action == "report":
        if place is None or place.rank == 0:
            _echo(finished_report(planned.spec, planned.directory, planned.state))
        return ExitCode.DONE
    if planned.start == "srun" and planned.machine.allocation is not None:
        start_by_srun(planned.spec, planned.composition.overrides, planned.machine.allocation)
    if planned.start == "job":
        from megalaunch.runs.submit import submit_run

        return submit_run(planned, detach, stop)
    if planned.start == "pod":
        from megalaunch.runs.elastic_pod import run_pod

        return run_pod(planned, stop)
    if not prepare_only:
        require_optional_packages(planned.spec)
    if place is not None and place.rank > 0:
        return join_run(planned.spec, planned.directory, place, planned.machine.cores, stop)
    background = continue_in_background() if detach else None
    lock = lock_directory(planned.directory)
    try:
        if planned.decision.action == "continue":
            typer.echo(f"continuing the run in {display_path(planned.directory.root)}")
        if place is not None:
            with Announcement(place, planned.directory) as announcement:
                planned = replace(planned, spec=prepare_data(planned))
                return _launch_first_node(planned, place, announcement, lock, stop)
        planned = replace(planned, spec=prepare_data(planned))
        _leave_terminal(planned.directory, background)
        return _write_spec(planned) if prepare_only else _launch(planned, lock, stop)
    except RunDirectoryError as error:
        refuse_directory(error)
    finally:
        unlock_run(planned.directory, lock)


def _leave_terminal(directory: RunDirectory, background: Background | None) -> None:
    """Continue in the background if that was asked for."""
    directory.command_log.unlink(missing_ok=True)  # of an earlier launch
    if background is not None:
        typer.echo(f"the run continues in process {os.getpid()}; output in {display_path(directory.command_log)}")
        typer.echo(f"next: megalaunch watch {shlex.quote(display_path(directory.root))}, logs or stop")
        background.leave_terminal(directory.command_log)


def _write_spec(planned: PreparedRun) -> ExitCode:
    from megalaunch.launch.directory import create_folders
    from megalaunch.rundir.rendezvous import keep_credentials
    from megalaunch.schema.spec_file import write_spec

    create_folders(planned.directory)
    write_spec(planned.spec, planned.directory.spec)
    if int(planned.spec.cluster.nodes) > 1:
        keep_credentials(planned.directory.rendezvous)
    typer.echo(f"wrote {display_path(planned.directory.spec)}")
    print_commands(planned)
    return ExitCode.DONE


def _launch(planned: PreparedRun, lock: RunLock, stop: StopSignals) -> ExitCode:
    from megalaunch.launch.display.open_display import open_display
    from megalaunch.launch.local import run_locally

    return _report(planned, run_locally(_describe_launch(planned, lock), stop, open_display), stop)


def _launch_first_node(
    planned: PreparedRun, place: NodePlace, announcement: Announcement, lock: RunLock, stop: StopSignals
) -> ExitCode:
    from megalaunch.launch.display.open_display import open_display
    from megalaunch.launch.node import NodeAgent, run_first_node

    agent = NodeAgent(planned.spec, planned.directory, place, planned.machine.cores)
    end = run_first_node(_describe_launch(planned, lock), agent, announcement, stop, open_display)
    return _report(planned, end, stop)


def _describe_launch(planned: PreparedRun, lock: RunLock) -> Launch:
    from megalaunch.launch.local import Launch
    from megalaunch.launch.run_state import throughput_basis

    spec = planned.spec
    overrides, cores = planned.composition.overrides, planned.machine.cores
    return Launch(spec, planned.directory, lock, overrides, throughput_basis(spec), cores)


def _report(planned: PreparedRun, end: LaunchResult, stop: StopSignals) -> ExitCode:
    """Print how a launch ended; return its exit code."""
    from megalaunch.launch.display.report import failure_report
    from megalaunch.launch.display.summary import run_summary

    spec, directory = planned.spec, planned.directory
    code = end.outcome.exit_code
    if code in (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.INTERRUPTED) and stop.count < 2:
        _plot(spec, directory)
        _echo(run_summary(spec, directory, end.outcome))
    _echo(failure_report(spec, directory, end), err=True)
    return ExitCode(code) if code in list(ExitCode) else ExitCode.CRASH


def _plot(spec: RunSpec, directory: RunDirectory) -> None:
    from megalaunch.launch.display.plot import plot_run
    from megalaunch.launch.display.plot_experts import plot_experts

    try:
        plot_run(directory, str(spec.run.name))
        plot_experts(directory, str(spec.run.name))
    except ImportError:
        _echo([f"note: no plot: matplotlib is not installed ({install_command('megalaunch[train]')})"])
    except OSError as error:
        _echo([f"note: no plot: {error}"])


def _echo(lines: list[str], err: bool = False) -> None:
    """Print lines; a closed pipe or terminal must not change the exit code."""
    try:
        for line in lines:
            typer.echo(line, err=err)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2 if err else 1)
        os.close(nowhere)
