"""`megalaunch plan`: memory, speed and rank grid of a run, predicted without the machine; or the best layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalaunch.config.compose import Composition
    from megalaunch.plan.resolve import Resolution


def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides: GROUP=OPTION (parallel=tp4pp4) and SECTION.KEY=VALUE (train.steps=100)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    show_assumptions: Annotated[
        bool, typer.Option("--assumptions", help="Also print every constant: name, value, source.")
    ] = False,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Budget for the days of training (15T, 300B); else train.steps.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank every layout of the model on these devices.")] = False,
    devices: Annotated[int | None, typer.Option(min=1, help="With --search: the number of devices.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Simulate one rank's step with the real engine, on fake tensors.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="With --deep: the rank (default: the first of the stage with the highest memory)."),
    ] = None,
) -> None:
    """Predict the memory, speed and rank groups of a run; search for its best layout; or simulate one rank's step.

    Exit code 0 when the run is valid, 2 when it is not.
    """
    from megalaunch.cli.plan.output import show_plan
    from megalaunch.plan.prediction import parse_tokens
    from megalaunch.runs.errors import fail

    if devices is not None and not search:
        fail("--devices needs --search; a plan is for the cluster of the run (cluster.nodes=N)")
    try:
        budget = parse_tokens(tokens) if tokens is not None else None
    except ValueError as error:
        fail(f"--tokens: {error}")
    if rank is not None and not deep:
        fail("--rank needs --deep; a plan reports the rank with the highest memory")
    if deep and (search or budget is not None or show_assumptions):
        fail("--deep simulates one rank; it cannot be combined with --search, --tokens or --assumptions")
    composition, resolution = _resolved(overrides or [])
    spec = resolution.spec
    if deep:
        from megalaunch.cli.plan.deep import show_deep

        show_deep(spec, composition.origins, rank, as_json)
        return
    if search:
        from megalaunch.cli.plan.search import show_search

        show_search(spec, devices, as_json)
        return
    if not show_plan(resolution, composition.origins, budget, as_json, show_assumptions):
        raise typer.Exit(2)


def _resolved(overrides: list[str]) -> tuple[Composition, Resolution]:
    """Compose the overrides and resolve the spec; exit with code 2 when they do not compose."""
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.report import finding_block, problems_as_findings, uncomposed_text
    from megalaunch.plan.resolve import resolve
    from megalaunch.platform.detect import detect_machine
    from megalaunch.runs.errors import refuse

    try:
        composition = compose(overrides)
    except ConfigError as error:
        refuse(uncomposed_text(error.problems))
    for finding in problems_as_findings(composition.repeated, "warning"):
        typer.echo(finding_block(finding), err=True)
    for note in composition.notes:
        typer.echo(f"note: {note.message}", err=True)
    return composition, resolve(composition.spec, detect_machine(), composition.choices.get("recipe"))
