"""`megalaunch sweep`: run many points that differ in a few overrides; invalid points are skipped before the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from megalaunch.runs.sweep.folder import Metric, Sampler
    from megalaunch.runs.sweep.overrides import SweepOverrides
    from megalaunch.runs.sweep.plan import Request


_SPEED_ONLY = (
    "parallel", "recompute", "precision", "platform", "cluster", "launcher", "logging", "checkpoint",
    "batch.micro_batch_size", "train.compile", "train.loss_chunks",
)  # fmt: skip
"""Groups and keys that change the speed of a run, not its result: a sweep over any other key is ranked by loss."""

MetricOption = Annotated[
    str | None,
    typer.Option(
        metavar="tokens_per_second|validation_loss|loss",
        help="Metric that ranks the trials (default: speed when only layouts are swept, else validation loss).",
    ),
]


def sweep(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides, as for train; at least one lists several values.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show which points would run, and why others would not.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout; everything else goes to stderr.")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of trials (default: the whole grid).")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(metavar="grid|random|tpe", help="Sampler of the points; tpe learns from earlier trials."),
    ] = None,
    metric: MetricOption = None,
    name: Annotated[str | None, typer.Option(help="The folder below sweeps/ (default: the recipe's name).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random and tpe samplers.")] = 1234,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Launch failed trials again.")] = False,
    trial: Annotated[int | None, typer.Option(min=1, help="Run only this trial here, and do not rank.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when launcher= has the trials: see status, logs and stop.")
    ] = False,
) -> None:
    """Run the points of a sweep one after the other, or by launcher=slurm, ssh, ray or kubernetes, and rank them.

    An override lists several values as parallel=tp1,tp2, choice(...), range(...), glob(...) or, for the random
    and tpe samplers, interval(low,high) and tag(log,interval(low,high)). Run the same command
    again to continue an interrupted sweep.
    """
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.report import problems_text
    from megalaunch.runs.errors import refuse
    from megalaunch.runs.sweep.overrides import parse_sweep
    from megalaunch.runs.sweep.plan import Request

    try:
        swept = parse_sweep(overrides or [])
    except ConfigError as error:
        refuse(problems_text(error.problems))
    request = Request(
        swept,
        _folder_name(swept, name),
        _sampler(sampler, swept, trials),
        _metric(metric, swept),
        trials,
        seed,
        retry_failed,
    )
    if dry_run:
        _show_points(request, as_json, detach)
    else:
        _run(request, as_json, trial, detach)


def _show_points(request: Request, as_json: bool, detach: bool) -> None:
    from megalaunch.runs.sweep.plan import plan_sweep
    from megalaunch.runs.sweep.report import dry_run_json, dry_run_text

    planned = plan_sweep(request, starts=False)
    typer.echo(dry_run_json(planned) if as_json else dry_run_text(planned))
    if not planned.runnable:
        raise typer.Exit(2)
    if planned.elsewhere and not as_json:
        from megalaunch.runs.sweep.task_set import trial_tasks
        from megalaunch.runs.task_set import print_task_manifest

        print_task_manifest(trial_tasks(planned), detach)


def _run(request: Request, as_json: bool, trial: int | None, detach: bool) -> NoReturn:
    from megalaunch.runs.errors import fail
    from megalaunch.runs.required_packages import require_training_packages
    from megalaunch.runs.sweep.plan import plan_sweep
    from megalaunch.runs.sweep.run import run_elsewhere, run_sweep, run_trial

    planned = plan_sweep(request, starts=True)
    if detach and not planned.elsewhere:
        fail("--detach needs a launcher\nfix:  launcher=slurm, ssh, ray or kubernetes; or leave --detach out")
    if planned.elsewhere and trial is None:
        run_elsewhere(planned, detach)
        raise typer.Exit(int(run_sweep(planned, as_json)))
    require_training_packages()
    raise typer.Exit(int(run_sweep(planned, as_json) if trial is None else run_trial(planned, trial)))


def _metric(name: str | None, swept: SweepOverrides) -> Metric:
    from megalaunch.runs.errors import fail

    match name:
        case None:
            layouts_only = all(key.partition(".")[0] in _SPEED_ONLY or key in _SPEED_ONLY for key in swept.axes)
            return "tokens_per_second" if layouts_only else "validation_loss"
        case "tokens_per_second" | "validation_loss" | "loss":
            return name
        case _:
            fail(f"unknown metric {name!r}\nfix:  --metric tokens_per_second, validation_loss or loss")


def _sampler(name: str | None, swept: SweepOverrides, trials: int | None) -> Sampler:
    from megalaunch.runs.errors import fail
    from megalaunch.runs.sweep.plan import MOST_POINTS

    if name is None:
        name = "grid" if swept.size is not None else "random"
    if name == "grid" and swept.size is None:
        fail("a grid needs lists of values, not an interval\nfix:  --sampler random --trials N, or a list of values")
    if name == "grid" and trials is None and (swept.size or 0) > MOST_POINTS:
        fail(
            f"the grid has {swept.size:,} points, more than {MOST_POINTS:,}\n"
            "fix:  --sampler random --trials N, --trials N for the first N points, or fewer values"
        )
    if trials is None and (name == "tpe" or (name == "random" and swept.size is None)):
        fail(f"the sampler {name} needs a number of trials\nfix:  --trials N")
    match name:
        case "grid" | "random" | "tpe":
            return name
        case _:
            fail(f"unknown sampler {name!r}\nfix:  --sampler grid, random or tpe")


def _folder_name(swept: SweepOverrides, name: str | None) -> str:
    import re
    from pathlib import Path

    from megalaunch.runs.errors import fail

    if name is None:
        recipe = next(
            (override.partition("=")[2] for override in swept.typed if override.startswith("recipe=")), "sweep"
        )
        name = "sweep" if "recipe" in swept.axes else Path(recipe).stem.replace("/", "_")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        fail(f"--name {name!r} is not a valid folder name\nfix:  use letters, digits, - _ and .")
    return name
