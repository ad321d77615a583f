"""`megalaunch runs list|compare|clean`: the runs of a folder, their differences, and the disk space that they use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.help_pages import CommandGroup

if TYPE_CHECKING:
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.catalog.clean import RunCleaning
    from megalaunch.schema import RunSpec

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="List, compare and clean the runs of a folder.",
)  # fmt: skip

Folder = Annotated[
    Path, typer.Argument(metavar="[FOLDER]", help="A folder with runs at any depth, or one run directory.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_runs(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs below a folder: state, steps, losses, speed and size on disk."""
    from dataclasses import asdict

    from megalaunch.cli.runs.output import list_lines
    from megalaunch.runs.catalog.summarize import summarize_run

    summaries = [summarize_run(run) for run in _find(folder)]
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"path": str(one.path)} for one in summaries], indent=2))
        return
    for line in list_lines(folder, summaries):
        typer.echo(line)


@app.command("compare")
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Two or more run directories.")],
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings that differ, and the figures at their ends and at their last common validation."""
    from dataclasses import asdict

    from megalaunch.cli.runs.output import comparison_lines
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.catalog.compare import compare_runs
    from megalaunch.runs.errors import fail

    if len(run_dirs) < 2:
        fail("name two or more run directories, such as runs/one runs/two")
    runs = [RunDirectory(path) for path in run_dirs]
    comparison = compare_runs(runs, [_read_spec(run) for run in runs])
    if as_json:
        typer.echo(json.dumps({"runs": [str(path) for path in run_dirs], **asdict(comparison)}, indent=2))
        return
    for line in comparison_lines(run_dirs, comparison):
        typer.echo(line)


@app.command("clean")
def clean(
    folder: Folder = Path("runs"),
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="Complete checkpoints to keep in each run: the newest.")
    ] = 1,
    only_newest: Annotated[
        bool, typer.Option("--only-newest", help="Remove those that checkpoint.keep_every keeps, too.")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Remove whole runs that failed before their first checkpoint.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Remove all checkpoints in the memory and on the disk of this machine, too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it the list is only printed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove interrupted saves and older checkpoints of the runs below a folder; print them first.

    Local checkpoints on this machine are removed if those in the run directory are as new.
    A running run is not touched, nor is a checkpoint from which another of these runs began.
    """
    from megalaunch.cli.runs.output import cleaning_lines, cleaning_rows
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.catalog.clean import CleaningRules, plan_cleaning

    rules = CleaningRules(keep=keep, keep_every=not only_newest, failed=failed, local=local)
    planned = plan_cleaning(_find(folder), rules)
    problems = _carry_out(planned) if yes else []
    if as_json:
        typer.echo(json.dumps({"removed": yes, "directories": cleaning_rows(planned), "problems": problems}, indent=2))
    else:
        for line in cleaning_lines(planned, removed=yes):
            typer.echo(line)
        for problem in problems:
            typer.echo(f"error: {problem}", err=True)
    if problems:
        raise typer.Exit(int(ExitCode.CHECKPOINT))


def _carry_out(planned: list[RunCleaning]) -> list[str]:
    """Remove what is planned; return the reason of each run that could not be cleaned."""
    from megalaunch.launch.directory import RunDirectoryError
    from megalaunch.launch.lock import RunLocked
    from megalaunch.runs.catalog.clean import clean_run

    problems = []
    for cleaning in planned:
        try:
            if cleaning.removals:
                clean_run(cleaning)
        except RunLocked as error:
            problems.append(f"{error}: it was not cleaned")
        except RunDirectoryError as error:
            problems.append(f"{error}: {error.fix}")
        except OSError as error:
            problems.append(f"{cleaning.run.root} could not be cleaned: {error.strerror} ({error.filename})")
    return problems


def _find(folder: Path) -> list[RunDirectory]:
    """Return the runs below a folder; end the command if it cannot be read."""
    from megalaunch.runs.catalog.find import find_runs
    from megalaunch.runs.errors import fail

    try:
        return list(find_runs(folder))
    except OSError as error:
        fail(f"{folder} cannot be read ({error.strerror}): name the folder that holds your runs")


def _read_spec(run: RunDirectory) -> RunSpec:
    from megalaunch.runs.errors import fail
    from megalaunch.schema import SpecError
    from megalaunch.schema.spec_file import read_spec

    try:
        return read_spec(run.spec)
    except FileNotFoundError:
        fail(f"{run.root} is not a run directory: it has no spec.yaml")
    except (SpecError, OSError) as error:
        fail(f"{run.root}: {error}")
