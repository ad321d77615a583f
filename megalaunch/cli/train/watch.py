"""`megalaunch watch`: the display of a run that another process launched, drawn from its run directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalaunch.launch.run_state import RunState
    from megalaunch.launch.supervise import Display
    from megalaunch.rundir.outcome import Outcome
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.schema import RunSpec

_POLL_SECONDS = 0.5


def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, for example runs/quickstart.")],
) -> None:
    """Show the display of a run that was launched elsewhere, until it ends. Ctrl-C leaves the run alone.

    The exit code is that of the run.
    """
    from megalaunch.launch.directory import run_is_locked
    from megalaunch.launch.display.open_display import open_display
    from megalaunch.launch.run_state import RunState, throughput_basis
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


def _conclude(spec: RunSpec, directory: RunDirectory) -> int:
    from megalaunch.launch.display.report import failure_report
    from megalaunch.launch.display.summary import run_summary
    from megalaunch.launch.supervise import LaunchResult
    from megalaunch.rundir.outcome import ExitCode, read_outcome

    outcome: Outcome | None = read_outcome(directory.outcome)
    if outcome is None:
        typer.echo(f"nobody runs {directory.root}, and its last launch left no outcome: it was killed", err=True)
        typer.echo("next: the same train command continues it from its newest checkpoint", err=True)
        return int(ExitCode.CRASH)
    for line in run_summary(spec, directory, outcome):
        typer.echo(line)
    for line in failure_report(spec, directory, LaunchResult(outcome)):
        typer.echo(line, err=True)
    return outcome.exit_code
