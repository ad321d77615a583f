"""`megalaunch train`: from words to a trained model; composes, checks, prepares, launches, reports."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.rundir.outcome import ExitCode

if TYPE_CHECKING:
    from megalaunch.config.schema import RunSpec
    from megalaunch.launch.lock import RunLock
    from megalaunch.launch.stop import StopSignals
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.prepare_run import PreparedRun

NEEDED_PACKAGES = ("torch", "safetensors")


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides: GROUP=OPTION (parallel=tp4pp4) and SECTION.KEY=VALUE (train.steps=100)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check, and print the command for each machine.")
    ] = False,
    prepare_only: Annotated[
        bool,
        typer.Option("--prepare-only", help="Prepare the data, write spec.yaml, print the commands; start nothing."),
    ] = False,
) -> None:
    """Train a model: compose and check the run, prepare its data, launch the workers, show progress, summarize.

    The same command again continues the run. Ctrl-C saves a checkpoint and ends; twice ends at once.
    """
    from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
    from megalaunch.runs.prepare_run import prepare_run

    starts = not (dry_run or prepare_only)
    if starts:
        require_training_packages()
    with StopSignals() as stop:
        try:
            planned = prepare_run(overrides or [], starts)
            if dry_run:
                _print_commands(planned)
                return
            code = _train(planned, stop, starts)
        except StopBeforeLaunch as stopped:
            typer.echo("stopped before the workers were started", err=True)
            code = stopped.exit_code
    raise typer.Exit(int(code))


def require_training_packages() -> None:
    """Refuse, naming the extra, where the launcher was installed without what trains."""
    from megalaunch.runs.errors import fail

    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            f"training needs {' and '.join(missing)}, which this installation of megalaunch lacks.\n"
            "fix:  pip install 'megalaunch[train]'"
        )


def _print_commands(planned: PreparedRun) -> None:
    from megalaunch.runs.prepare_run import command_lines

    for line in command_lines(planned):
        typer.echo(line)
    if not planned.directory.spec.exists():
        typer.echo(f"# {planned.directory.spec} does not exist yet: train writes it, and so does train --prepare-only")


def _train(planned: PreparedRun, stop: StopSignals, starts: bool) -> ExitCode:
    from megalaunch.launch.directory import RunDirectoryError, lock_run, unlock_run
    from megalaunch.launch.lock import RunLocked
    from megalaunch.launch.summary import finished_report
    from megalaunch.runs.prepare_run import prepare_data, refuse_directory

    if planned.decision.action == "report":
        _echo(finished_report(planned.spec, planned.directory, planned.state))
        return ExitCode.DONE
    try:
        lock = lock_run(planned.directory)
    except RunDirectoryError as error:
        refuse_directory(error)
    except RunLocked as error:
        from megalaunch.runs.errors import fail

        fail(f"{error}\nfix:  wait for it or stop it there, or name another run.directory")
    try:
        if planned.decision.action == "continue":
            typer.echo(f"continuing the run in {planned.directory.root}")
        spec = prepare_data(planned)
        if not starts:
            return _freeze_only(replace(planned, spec=spec))
        return _launch(replace(planned, spec=spec), lock, stop)
    except RunDirectoryError as error:
        refuse_directory(error)
    finally:
        unlock_run(planned.directory, lock)


def _freeze_only(planned: PreparedRun) -> ExitCode:
    from megalaunch.config.spec_file import write_spec
    from megalaunch.launch.directory import create_folders
    from megalaunch.rundir.rendezvous import keep_credentials

    create_folders(planned.directory)
    write_spec(planned.spec, planned.directory.spec)
    if planned.spec.cluster.nodes > 1:
        keep_credentials(planned.directory.rendezvous)
    typer.echo(f"wrote {planned.directory.spec}")
    _print_commands(planned)
    return ExitCode.DONE


def _launch(planned: PreparedRun, lock: RunLock, stop: StopSignals) -> ExitCode:
    from megalaunch.launch.local import Launch, run_locally
    from megalaunch.launch.open_display import open_display
    from megalaunch.launch.report import failure_report
    from megalaunch.launch.run_state import throughput_basis
    from megalaunch.launch.summary import run_summary

    spec, directory = planned.spec, planned.directory
    launch = Launch(spec, directory, lock, planned.composition.overrides, throughput_basis(spec), planned.machine.cores)
    end = run_locally(launch, stop, open_display)
    code = end.outcome.exit_code
    if code in (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.INTERRUPTED) and stop.count < 2:
        _draw(spec, directory)
        _echo(run_summary(spec, directory, end.outcome))
    _echo(failure_report(spec, directory, end), err=True)
    return ExitCode(code) if code in list(ExitCode) else ExitCode.CRASH


def _draw(spec: RunSpec, directory: RunDirectory) -> None:
    from megalaunch.launch.plot import plot_run

    try:
        plot_run(directory, str(spec.run.name))
    except ImportError:
        _echo(["note: no plot, since matplotlib is not installed (pip install 'megalaunch[train]')"])
    except OSError as error:
        _echo([f"note: no plot: {error}"])


def _echo(lines: list[str], err: bool = False) -> None:
    """Print; a reader that is gone (a closed pipe or terminal) must not change how the command ends."""
    try:
        for line in lines:
            typer.echo(line, err=err)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2 if err else 1)
        os.close(nowhere)
