"""How much of a long piece of work is done, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import typer

_EVERY = 0.5  # seconds between two figures


def percent_progress(what: str, after: str = "") -> Callable[[int, int], None]:
    """What to call with (done, total): draws `what: 40%` over itself, and `after` when all is done."""
    shown = time.monotonic()
    over = f"{what}: 100%"

    def show(done: int, total: int) -> None:
        nonlocal shown
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        if done >= total and after:
            typer.echo(f"\r{after:{len(over)}}\r", err=True, nl=False)
        elif now - shown > _EVERY:
            shown = now
            typer.echo(f"\r{what}: {done / max(1, total):4.0%}\r", err=True, nl=False)

    return show
