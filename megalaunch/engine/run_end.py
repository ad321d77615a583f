"""Controlled ends of a run: an error on one rank, and the exception that ends all ranks together."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from megalaunch.rundir.outcome import ExitCode


@dataclass(frozen=True)
class RankError:
    """An error on this rank, perhaps on no other; it ends the run at the next collective that shares errors."""

    exit_code: ExitCode
    reason: str


def exit_code_of(stop: signal.Signals) -> ExitCode:
    """Return the exit code of a run that a signal has stopped."""
    return ExitCode.INTERRUPTED if stop == signal.SIGINT else ExitCode.PREEMPTED


class RunEnd(Exception):
    """The end of a run, raised on every rank; the worker writes it as the outcome and exits with 0.

    Args:
        exit_code: Exit code of the run.
        reason: One sentence for the user.
        step: The last finished step.
        details: Further values for outcome.json.
    """

    def __init__(self, exit_code: ExitCode, reason: str, step: int, details: dict[str, Any] | None = None) -> None:
        self.exit_code, self.reason, self.step, self.details = exit_code, reason, step, details or {}
        super().__init__(reason)
