"""`megalaunch platform check`: compare the operators of a platform with plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.help_pages import CommandGroup
from megalaunch.format.table import table_lines

if TYPE_CHECKING:
    from megalaunch.engine.api import DeviceCheck, OperatorCheck

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Check a platform.",
)  # fmt: skip


@app.callback()
def _group() -> None:
    """Keep `check` a command of its own: Typer would drop the name of an only one."""


@app.command("check")
def check(
    name: Annotated[
        str | None, typer.Argument(metavar="[PLATFORM]", help="Platform; default: the one that a run here uses.")
    ] = None,
) -> None:
    """Call what a run asks of a device, and compare its operators, overrides included, with plain torch in fp64.

    Values and gradients are compared: some vendors' kernels compute wrong values without an error. Exit code 2 if one
    is wrong, or the device cannot do something.
    """
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import fail
    from megalaunch.runs.required_packages import require_training_packages

    require_training_packages()
    from megalaunch.engine.api import check_platform

    try:
        device, abilities, checks = check_platform(name)
    except ValueError as error:
        fail(str(error))
    typer.echo(f"device {device}")
    typer.echo("\n".join(table_lines([(one.ability, one.problem or "ok") for one in abilities])))
    typer.echo(f"\noperators on {device}")
    header = ("operator", "implementation", "dtype", "forward error", "backward error", "limit", "")
    typer.echo("\n".join(table_lines([header, *(_row(one) for one in checks)])))
    failures = _failures(device, abilities, checks)
    if failures:
        typer.echo("\n".join(failures), err=True)
        raise typer.Exit(ExitCode.CONFIGURATION)
    typer.echo("all are right")


def _failures(device: str, abilities: list[DeviceCheck], checks: list[OperatorCheck]) -> list[str]:
    """Return the lines that name what is wrong, each with its fix; none if all is right."""
    lines = []
    broken = [one.ability for one in abilities if one.problem is not None]
    if broken:
        lines += [f"wrong: {device} fails in {', '.join(broken)}", f"fix:  repair the package that adds {device}"]
    wrong = sorted({f"{one.operator} by {one.implementation}" for one in checks if not one.passed})
    if wrong:
        lines += [f"wrong: {', '.join(wrong)}", "fix:  repair or uninstall the package of an override before training"]
    return lines


def _row(one: OperatorCheck) -> tuple[str, ...]:
    errors = (f"{one.forward:.1e}", "-" if one.backward is None else f"{one.backward:.1e}", f"{one.limit:g}")
    return one.operator, one.implementation, one.dtype, *errors, one.problem or ("ok" if one.passed else "wrong")
