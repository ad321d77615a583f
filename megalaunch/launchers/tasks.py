"""Independent tasks of one command, such as the shards of a `preprocess`, each with its own number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TaskSet:
    """Commands that differ only in a number.

    Attributes:
        before: arguments of `megalaunch` before the number.
        after: those after it.
        numbers: of the tasks.
        working_directory: of the commands; absolute.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    numbers: tuple[int, ...]
    working_directory: Path

    def arguments(self, number: int) -> tuple[str, ...]:
        """Return the arguments of `megalaunch` for a task."""
        return (*self.before, str(number), *self.after)
