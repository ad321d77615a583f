"""`resumes.jsonl`: the steps from which a run was continued. By them a local checkpoint of dropped steps is recognized.

The node of a local checkpoint may be away while the run continues from an earlier step, under other settings or without
a bad batch. When that node is back, its files are complete and of a higher step, but no longer of this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalaunch.fs import sync_file
from megalaunch.rundir.jsonl import append_line, read_lines


def append_resume(path: Path, attempt: int, step: int) -> None:
    """Record that an attempt, a start of all workers, continues from a step. Raises OSError."""
    append_line(path, {"attempt": attempt, "step": step})
    sync_file(path)


def read_resumes(path: Path) -> list[int]:
    """Return the steps of all resumes, the oldest first. Raises OSError."""
    return [int(line.get("step", 0)) for line in read_lines(path)]


def dropping_resume(step: int, known: int, resumes: Sequence[int]) -> int | None:
    """Return the step of the first resume that has dropped the state of `step`; None if the run still has it.

    Args:
        step: of the state.
        known: number of resumes when the state was saved.
        resumes: steps of all resumes.
    """
    return next((start for start in resumes[known:] if start < step), None)
