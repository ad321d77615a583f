"""`megalaunch platform check`: compare the operators of a platform with plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.help_pages import CommandGroup
from megalaunch.format.table import table_lines

if TYPE_CHECKING:
    from megalaunch.engine.api import OperatorCheck

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
    """Compare the operators of a platform, overrides included, with plain torch in fp64: values and gradients.

    Exit code 2 if one is wrong: some vendors' kernels compute wrong values without an error.
    """
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import fail
    from megalaunch.runs.required_packages import require_training_packages

    require_training_packages()
    from megalaunch.engine.api import check_platform

    try:
        device, checks = check_platform(name)
    except ValueError as error:
        fail(str(error))
    typer.echo(f"operators on {device}")
    header = ("operator", "implementation", "dtype", "forward error", "backward error", "limit", "")
    for line in table_lines([header, *(_row(one) for one in checks)]):
        typer.echo(line)
    wrong = [one for one in checks if not one.passed]
    if wrong:
        names = ", ".join(sorted({f"{one.operator} by {one.implementation}" for one in wrong}))
        typer.echo(f"wrong: {names}\nfix:  repair or uninstall the package of an override before training", err=True)
        raise typer.Exit(ExitCode.CONFIGURATION)
    typer.echo("all are right")


def _row(one: OperatorCheck) -> tuple[str, ...]:
    errors = (f"{one.forward:.1e}", "-" if one.backward is None else f"{one.backward:.1e}", f"{one.limit:g}")
    return one.operator, one.implementation, one.dtype, *errors, one.problem or ("ok" if one.passed else "wrong")
