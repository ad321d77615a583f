"""How a command refuses: the reason on standard error, and an exit code that says what kind it is."""

from __future__ import annotations

from typing import NoReturn

import typer

from megalaunch.rundir.outcome import ExitCode


def refuse(text: str, code: ExitCode = ExitCode.CONFIGURATION) -> NoReturn:
    """Print the reason and end the command with `code`."""
    typer.echo(text, err=True)
    raise typer.Exit(int(code))


def fail(reason: str, code: ExitCode = ExitCode.CONFIGURATION) -> NoReturn:
    """The same with `error:` before a reason that is no report of its own."""
    refuse(f"error: {reason}", code)
