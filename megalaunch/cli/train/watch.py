"""`megalaunch watch`: the display of a run that another process launched, drawn from its run directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalaunch.launch.run_state import RunState
    from megalaunch.launch.supervise import Display
    from megalaunch.launchers.record import JobRecord
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.schema import RunSpec

_POLL_SECONDS = 0.5


def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, for example runs/quickstart.")],
    web: Annotated[bool, typer.Option("--web", help="Serve the report of the run as a live page instead.")] = False,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="With --web: the IP address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="With --web: the port to listen on; 0: a free one.")
    ] = 0,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="With --web: --host may be an address that other machines reach.")
    ] = False,
) -> None:
    """Show the display of a run that was launched elsewhere, until it ends. Ctrl-C leaves the run alone.

    The exit code is that of the run. With --web a page in the browser shows the report of the run and follows it,
    until Ctrl-C.

    Example: megalaunch watch --web runs/quickstart
    """
    from megalaunch.launch.directory import run_is_locked
    from megalaunch.launch.display.open_display import open_display
    from megalaunch.launch.run_state import RunState, throughput_basis
    from megalaunch.launchers.record import read_record
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.errors import fail
    from megalaunch.schema import SpecError
    from megalaunch.schema.spec_file import read_spec

    directory = RunDirectory(run_dir.absolute())
    try:
        spec = read_spec(directory.spec)
    except FileNotFoundError:
        fail(f"{run_dir} is not a run directory: it has no spec.yaml")
    except (SpecError, OSError) as error:
        fail(str(error))
    if web:
        from megalaunch.cli.train.watch_web import serve_page

        serve_page(directory, host, port, allow_remote)
        return
    record = read_record(directory.job)
    if record is not None:
        raise typer.Exit(int(_watch_job(spec, directory, record)))
    view = RunState(spec, directory, throughput_basis(spec), attach=True)
    if run_is_locked(directory):
        display = open_display(view)
        try:
            _tail(view, display)
        except KeyboardInterrupt:
            display.close()
            typer.echo("the run continues")
            return
        display.close()
    raise typer.Exit(_conclude(spec, directory))


def _tail(view: RunState, display: Display) -> None:
    from megalaunch.launch.directory import run_is_locked

    while True:
        running = run_is_locked(view.directory)  # before looking, so that the last look sees all
        view.refresh()
        display.update(view)
        if not running:
            return
        time.sleep(_POLL_SECONDS)


def _watch_job(spec: RunSpec, directory: RunDirectory, record: JobRecord) -> ExitCode:
    """Follow the run of a job to its end."""
    from megalaunch.launch.stop import StopSignals
    from megalaunch.launchers.launcher import LauncherError
    from megalaunch.launchers.select_launcher import select_launcher
    from megalaunch.runs.errors import fail
    from megalaunch.runs.follow_job import JobView, follow_job, print_end

    try:
        launcher = select_launcher(record.launcher)
        view = JobView(spec, directory, record.submitted)
        with StopSignals() as stop:
            return print_end(view, launcher, record, follow_job(view, launcher, record, stop))
    except LauncherError as error:
        fail(error.text())


def _conclude(spec: RunSpec, directory: RunDirectory) -> int:
    from megalaunch.rundir.outcome import ExitCode, read_outcome
    from megalaunch.runs.follow_job import print_outcome

    outcome = read_outcome(directory.outcome)
    if outcome is None:
        typer.echo(f"nobody runs {directory.root}, and its last launch left no outcome: it was killed", err=True)
        typer.echo("next: the same train command continues it from its newest checkpoint", err=True)
        return int(ExitCode.CRASH)
    return int(print_outcome(spec, directory, outcome))
