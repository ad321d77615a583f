"""A run that ends on purpose, on all ranks together."""

from __future__ import annotations

from typing import Any

from megalaunch.rundir.outcome import ExitCode


class Ending(Exception):
    """Raised on every rank alike; the worker writes it as the outcome and exits 0."""

    def __init__(self, exit_code: ExitCode, reason: str, step: int, details: dict[str, Any] | None = None) -> None:
        self.exit_code, self.reason, self.step, self.details = exit_code, reason, step, details or {}
        super().__init__(reason)
