"""The bad steps of a run: `bad_steps.json` holds each with the batches that the run leaves out because of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megalaunch.fs import write_file_atomically


@dataclass(frozen=True)
class BadStepRecord:
    """One bad step; the batches of steps `first` to `step` are left out."""

    step: int
    first: int
    reason: str


def read_bad_steps(path: Path) -> list[BadStepRecord]:
    """Return the bad steps of a run, oldest first; none without a file.

    Raises:
        OSError: The file cannot be read, or is none that a run wrote.
    """
    try:
        document = json.loads(path.read_text())
        return [BadStepRecord(int(row["step"]), int(row["first"]), str(row["reason"])) for row in document["bad_steps"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{path} is damaged: restore it, or remove it to train the batches that it leaves out") from error


def write_bad_steps(path: Path, records: Sequence[BadStepRecord]) -> None:
    """Write the bad steps atomically, synced to disk. Raises OSError."""
    document = {"bad_steps": [asdict(record) for record in records]}
    write_file_atomically(path, json.dumps(document, indent=1) + "\n")
