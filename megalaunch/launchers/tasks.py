"""Independent tasks of one work, such as the shards of a `preprocess`: each is one command of its own number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TaskSet:
    """Commands that differ only in a number, and one command after all of them.

    Attributes:
        name: a short name for lists.
        before: arguments of `megalaunch` before the number.
        after: those after it.
        numbers: of the tasks.
        finish: arguments of the command that runs once all tasks have succeeded.
        directory: the directory of scripts and output, seen by all nodes; absolute.
        working_directory: of the commands; absolute.
    """

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    numbers: tuple[int, ...]
    finish: tuple[str, ...]
    directory: Path
    working_directory: Path

    def arguments(self, number: int) -> tuple[str, ...]:
        """Return the arguments of `megalaunch` for a task."""
        return (*self.before, str(number), *self.after)
