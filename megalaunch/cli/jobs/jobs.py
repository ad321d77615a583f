"""`megalaunch status`, `logs`, `stop` and `list`: what became of submitted runs, and their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalaunch.rundir.paths import RunDirectory

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, for example runs/quickstart.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show where a run runs, the state of its job, how far it is and how it ended."""
    from megalaunch.cli.jobs.output import job_row, status_lines
    from megalaunch.runs.job_states import find_job

    job = find_job(_run(run_dir))
    if as_json:
        typer.echo(json.dumps(job_row(job), indent=2))
        return
    for line in status_lines(job):
        typer.echo(line)


def list_jobs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A folder with runs at any depth.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder that were submitted as jobs, with the state of each job."""
    from megalaunch.cli.jobs.output import job_row, list_lines
    from megalaunch.runs.errors import fail
    from megalaunch.runs.job_states import find_jobs

    if not folder.is_dir():
        fail(f"{folder} is not a directory")
    jobs = list(find_jobs(folder))
    if as_json:
        typer.echo(json.dumps([job_row(job) for job in jobs], indent=2))
        return
    for line in list_lines(folder, jobs):
        typer.echo(line)


def stop(
    run_dir: RunDir,
    now: Annotated[bool, typer.Option("--now", help="End it at once, without a checkpoint.")] = False,
) -> None:
    """Stop a run: its workers save a checkpoint and end. A job that still waits is cancelled."""
    from megalaunch.launchers.launcher import LauncherError
    from megalaunch.runs.errors import fail
    from megalaunch.runs.job_states import find_job, stop_job

    try:
        typer.echo(stop_job(find_job(_run(run_dir)), at_once=now))
    except LauncherError as error:
        fail(error.text())


def logs(
    run_dir: RunDir,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="The log of one rank, not that of the job.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Print this many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
) -> None:
    """Print the output of a run's job, or the log of one of its ranks."""
    from megalaunch.cli.jobs.print_logs import (
        empty_logs_text,
        follow_logs,
        log_files,
        missing_log_text,
        print_last_lines,
    )
    from megalaunch.runs.errors import fail
    from megalaunch.runs.job_states import find_job

    directory = _run(run_dir)
    job = find_job(directory)
    paths = log_files(job, rank)
    if not paths and not (follow and rank is None and job.status.phase == "pending"):
        fail(missing_log_text(job, rank))
    print_last_lines(paths, lines)
    if not follow and (text := empty_logs_text(job, rank, paths)):
        typer.echo(text, err=True)
    if follow:
        follow_logs(directory, rank)


def _run(path: Path) -> RunDirectory:
    """Return a run directory; end the command if it is not one."""
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.errors import fail

    directory = RunDirectory(path.absolute())
    if not (directory.spec.exists() or directory.job.exists()):
        fail(f"{path} is not a run directory: it has no spec.yaml and no job.json")
    return directory
