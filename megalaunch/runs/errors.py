"""End a command with an error: the reason on standard error, and an exit code for its kind."""

from __future__ import annotations

from typing import NoReturn

import typer

from megalaunch.rundir.outcome import ExitCode


def refuse(text: str, code: int = ExitCode.CONFIGURATION) -> NoReturn:
    """Print the reason and end the command with `code`."""
    typer.echo(text, err=True)
    raise typer.Exit(int(code))


def fail(reason: str, code: int = ExitCode.CONFIGURATION) -> NoReturn:
    """Print `error: ` and the reason, and end the command with `code`."""
    refuse(f"error: {reason}", code)
