"""`megalaunch checkpoint`: list the checkpoints of a run, inspect one, verify checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.help_pages import CommandGroup

if TYPE_CHECKING:
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.schema import RunSpec

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="List, inspect and verify checkpoints.",
)

Source = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_checkpoints(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")], as_json: AsJson = False
) -> None:
    """List the checkpoints of a run: step, size, whether it is complete, and why it is retained.

    Those in the memory and on the disk of this machine follow (checkpoint.memory, checkpoint.local).
    """
    from megalaunch.cli.checkpoint.output import list_lines, list_rows, local_lines, local_rows
    from megalaunch.fs import list_temporary_directories
    from megalaunch.rundir.checkpoint.listing import checkpoint_info, checkpoints_by_step, directory_size
    from megalaunch.runs.catalog.local_checkpoints import local_checkpoints

    run = _find_run(run_dir)
    found = [checkpoint_info(path) for path in sorted(checkpoints_by_step(run.checkpoints).values())]
    unfinished = {path.name: directory_size(path) for path in list_temporary_directories(run.checkpoints)}
    spec = _read_spec(run.spec)
    rows, local = list_rows(found, spec), local_rows(local_checkpoints(run, spec) if spec is not None else ())
    if as_json:
        typer.echo(json.dumps({"checkpoints": rows, "unfinished": unfinished, "local": local}, indent=2))
        return
    from megalaunch.launch.directory import run_is_locked

    for line in list_lines(run.checkpoints, rows, unfinished, run_is_locked(run)):
        typer.echo(line)
    for line in local_lines(local):
        typer.echo(line)


@app.command()
def inspect(
    path: Source,
    every: Annotated[
        bool, typer.Option("--all", help="One row per tensor; by default equal layers share one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the content of a checkpoint (for a run: its newest complete one): step, layout, tensors, totals."""
    from megalaunch.cli.checkpoint.output import inspect_lines
    from megalaunch.cli.checkpoint.summary import summarize_checkpoint
    from megalaunch.rundir.checkpoint.contents import SPEC_FILE
    from megalaunch.rundir.checkpoint.errors import CheckpointError
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import fail

    checkpoint = _find_checkpoints(path)[0]
    try:
        summary = summarize_checkpoint(checkpoint, _read_spec(checkpoint / SPEC_FILE))
    except CheckpointError as error:
        fail(str(error), ExitCode.CHECKPOINT)
    for line in [json.dumps(summary, indent=2)] if as_json else inspect_lines(checkpoint, summary, every):
        typer.echo(line)


@app.command()
def verify(path: Source) -> None:
    """Verify every file of a checkpoint (for a run: of all its checkpoints) by checksum; name the files that differ.

    The exit code is 4 if a checkpoint is damaged.
    """
    from megalaunch.cli.checkpoint.output import verification_lines
    from megalaunch.cli.output.progress import percent_progress
    from megalaunch.rundir.checkpoint.manifest import read_manifest, verify_checkpoint
    from megalaunch.rundir.outcome import ExitCode

    damaged = 0
    for checkpoint in _find_checkpoints(path, only_complete=False):
        problems = verify_checkpoint(checkpoint, read=percent_progress(checkpoint.name))
        damaged += bool(problems)
        sizes = [] if problems else [record.size for record in read_manifest(checkpoint)]
        for line in verification_lines(checkpoint, sizes, problems):
            typer.echo(line, err=bool(problems))
    if damaged:
        raise typer.Exit(int(ExitCode.CHECKPOINT))


def _find_run(path: Path) -> RunDirectory:
    """Return the run at `path`; end the command if there is none."""
    from megalaunch.rundir.checkpoint.manifest import MANIFEST
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.errors import fail

    if (path / MANIFEST).exists():
        fail(f"{path} is a checkpoint, not a run: megalaunch checkpoint inspect {path}")
    run = RunDirectory(path)
    if not run.checkpoints.is_dir() and not run.spec.is_file():
        cause = "has neither a checkpoint nor a run" if path.is_dir() else "is not a directory"
        fail(f"{path} {cause}: name a run directory such as runs/quickstart")
    return run


def _find_checkpoints(path: Path, only_complete: bool = True) -> list[Path]:
    """Return a checkpoint itself, or all (or all complete) checkpoints of a run, newest first; at least one."""
    from megalaunch.rundir.checkpoint.listing import checkpoints_by_step
    from megalaunch.rundir.checkpoint.manifest import MANIFEST, verify_checkpoint
    from megalaunch.rundir.checkpoint.tensor_index import TENSOR_INDEX
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.rundir.paths import checkpoint_step
    from megalaunch.runs.errors import fail

    if path.is_dir() and (
        (path / MANIFEST).exists() or (path / TENSOR_INDEX).exists() or checkpoint_step(path) is not None
    ):
        return [path]
    run = _find_run(path)
    found = list(checkpoints_by_step(run.checkpoints).values())
    if only_complete:
        found = [checkpoint for checkpoint in found if not verify_checkpoint(checkpoint, hashes=False)]
    if not found:
        kind = "complete checkpoint" if only_complete else "checkpoint"
        fail(f"{run.checkpoints} has no {kind}", ExitCode.CHECKPOINT)
    return found


def _read_spec(path: Path) -> RunSpec | None:
    """Return the spec at `path`; None if it is missing or invalid."""
    from megalaunch.schema import SpecError
    from megalaunch.schema.spec_file import read_spec

    try:
        return read_spec(path)
    except (SpecError, OSError):
        return None
