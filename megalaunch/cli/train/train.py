"""`megalaunch train`: compose, check, prepare, launch and report a run."""

from __future__ import annotations

from typing import Annotated

import typer

from megalaunch.cli.train.hydra_options import Cfg, ConfigDirs, Info, show_composition, with_config_dirs


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
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run a sweep, as `megalaunch sweep` with the same overrides.")
    ] = False,
    config_dir: ConfigDirs = None,
    cfg: Cfg = None,
    info: Info = None,
) -> None:
    """Train a model: compose and check the run, prepare its data, launch the workers, show progress, summarize.

    Run the same command again to continue. Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once.
    """
    from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
    from megalaunch.runs.prepare_run import prepare_run
    from megalaunch.runs.train import print_commands, require_training_packages, train_run

    typed = with_config_dirs(overrides, config_dir)
    if show_composition(typed, cfg, info):
        return
    if multirun:
        from megalaunch.cli.sweep import sweep

        sweep(typed, dry_run=dry_run)
        return
    starts = not (dry_run or prepare_only)
    if starts:
        require_training_packages()
    with StopSignals() as stop:
        try:
            planned = prepare_run(typed, starts)
            if dry_run:
                print_commands(planned)
                return
            code = train_run(planned, stop, prepare_only)
        except StopBeforeLaunch as stopped:
            typer.echo("stopped before the workers started", err=True)
            code = stopped.exit_code
    raise typer.Exit(int(code))
