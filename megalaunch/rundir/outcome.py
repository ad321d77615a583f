"""The end of a launch: exit codes and `outcome.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from megalaunch.fs import reserve_space, write_file_atomically

_RESERVED_BYTES = 4096


class ExitCode(IntEnum):
    """Exit codes of the launcher, also written to outcome.json."""

    DONE = 0
    CONFIGURATION = 2
    DATA = 3
    CHECKPOINT = 4
    CRASH = 5
    HANG = 6
    NON_FINITE = 7
    NO_PROGRESS = 8
    PREEMPTED = 75
    INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """The outcome of a launch. `step` is the last finished step; `details` is plain JSON for the report."""

    exit_code: int
    reason: str
    step: int
    details: dict[str, Any] = field(default_factory=dict)


def reserve_outcome_space(path: Path) -> None:
    """Reserve disk space for the outcome at the start, so that a run that fills the disk can still write it."""
    reserve_space(path, _RESERVED_BYTES)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write the outcome by an atomic rename, in the reserved file if there is one."""
    write_file_atomically(path, json.dumps(asdict(outcome), indent=2), leftover="reuse")


def read_outcome(path: Path) -> Outcome | None:
    """Return the recorded outcome, or None if there is no readable one."""
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
