"""How a run ends on purpose: what one rank found wrong, and the end that all ranks come to together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalaunch.rundir.outcome import ExitCode


@dataclass(frozen=True)
class RankError:
    """What this rank, perhaps alone, found wrong; it ends the run once every rank has heard of it."""

    exit_code: ExitCode
    reason: str


class RunEnd(Exception):
    """Raised on every rank alike; the worker writes it as the outcome and exits 0. `step` is the last finished one."""

    def __init__(self, exit_code: ExitCode, reason: str, step: int, details: dict[str, Any] | None = None) -> None:
        self.exit_code, self.reason, self.step, self.details = exit_code, reason, step, details or {}
        super().__init__(reason)
