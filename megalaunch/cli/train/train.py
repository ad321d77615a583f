"""`megalaunch train`: compose, check, prepare, launch and report a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.train.hydra_options import Cfg, ConfigDirs, Info, show_composition, with_config_dirs

if TYPE_CHECKING:
    from megalaunch.launch.stop import StopSignals
    from megalaunch.rundir.outcome import ExitCode

Rehearse = Annotated[
    bool,
    typer.Option(
        "--rehearse",
        help="Play the run with small sizes on this machine's CPUs: train, resume, reshard, export, generate.",
    ),
]
BranchFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@STEP]",
        help="Start a new run with a checkpoint of another run, optimizer and step included (checkpoint.branch_from).",
    ),
]
RehearsalDirectory = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="With --rehearse: a new directory, kept (default: a temporary one)."),
]


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
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the job or the run has started: see watch, logs and stop.")
    ] = False,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run a sweep, as `megalaunch sweep` with the same overrides.")
    ] = False,
    config_dir: ConfigDirs = None,
    cfg: Cfg = None,
    info: Info = None,
    branch_from: BranchFrom = None,
    rehearse: Rehearse = False,
    run_dir: RehearsalDirectory = None,
) -> None:
    """Train a model: compose and check the run, prepare its data, launch the workers, show progress, summarize.

    Run the same command again to continue. Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once.
    """
    from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
    from megalaunch.runs.final_code import final_code_written
    from megalaunch.runs.prepare_run import prepare_run
    from megalaunch.runs.train import print_commands, train_run

    typed = [*with_config_dirs(overrides, config_dir), *_branch_override(branch_from)]
    if show_composition(typed, cfg, info):
        return
    if multirun:
        from megalaunch.cli.sweep import sweep

        sweep(typed, dry_run=dry_run, detach=detach)
        return
    if rehearse or run_dir is not None:
        _require_only_rehearsal(rehearse, prepare_only)
    starts = not (dry_run or prepare_only)
    with StopSignals() as stop, final_code_written(os.environ):
        try:
            if rehearse:
                code = _rehearse(typed, dry_run, run_dir, stop)
                raise typer.Exit(int(code))
            planned = prepare_run(typed, starts)
            if dry_run:
                print_commands(planned)
                return
            code = train_run(planned, stop, prepare_only, detach)
        except StopBeforeLaunch as stopped:
            typer.echo("stopped before the workers started", err=True)
            code = stopped.exit_code
        raise typer.Exit(int(code))


def _branch_override(reference: str | None) -> list[str]:
    """Return the override that --from stands for."""
    from megalaunch.plan.findings import as_override

    return [] if reference is None else [f"checkpoint.branch_from={as_override(reference)}"]


def _require_only_rehearsal(rehearse: bool, prepare_only: bool) -> None:
    """End the command for options that contradict each other."""
    from megalaunch.runs.errors import fail

    if not rehearse:
        fail("--run-dir is an option of --rehearse\nfix:  run.directory=DIR names the directory of a run")
    if prepare_only:
        fail("--rehearse starts workers, --prepare-only starts nothing\nfix:  leave one of them out")


def _rehearse(overrides: list[str], dry_run: bool, run_dir: Path | None, stop: StopSignals) -> ExitCode:
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.rehearsal.run import prepare_rehearsal, print_differences, rehearse
    from megalaunch.runs.required_packages import require_training_packages

    if not dry_run:
        require_training_packages()
    prepared = prepare_rehearsal(overrides)
    if dry_run:
        print_differences(prepared)
        return ExitCode.DONE
    return rehearse(prepared, run_dir, overrides, stop)
