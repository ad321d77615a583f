"""How a launch ended: exit codes, and `outcome.json`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from megalaunch.rundir.atomic_file import sync_directory, temporary_path
from megalaunch.rundir.files import create_file, open_file

_RESERVED_BYTES = 4096


class ExitCode(IntEnum):
    """What the launcher's exit code means; the same number stands in outcome.json."""

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
    """`step` is the last finished step; `details` what a report shows, all of it plain JSON."""

    exit_code: int
    reason: str
    step: int
    details: dict[str, Any] = field(default_factory=dict)


def reserve_outcome_space(path: Path) -> None:
    """Take the disk space of an outcome at the start, so that a run which fills the disk can still say so."""
    with os.fdopen(create_file(temporary_path(path)), "wb") as file:
        file.write(b" " * _RESERVED_BYTES)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write by an atomic rename: a reader sees the old outcome or the new one. Uses what was reserved, if anything."""
    content = json.dumps(asdict(outcome), indent=2).encode()
    unfinished = temporary_path(path)
    descriptor = open_file(unfinished, os.O_WRONLY | os.O_CREAT)  # not cut: that would give the space away
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_directory(path.parent)


def read_outcome(path: Path) -> Outcome | None:
    """The recorded outcome, or None when there is none that can be read."""
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
