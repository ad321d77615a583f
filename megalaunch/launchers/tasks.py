"""Independent tasks of one command, such as the shards of a `preprocess`, each with its own number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megalaunch.launchers.launcher import Job
from megalaunch.launchers.record import JobRecord
from megalaunch.schema.launcher import LauncherSpec

ATTEMPTS = 2
"""How often a task is started whose process or machine is lost; the same command continues after that."""


@dataclass(frozen=True)
class TaskSet:
    """Commands that differ only in a number, and the command that needs all of them.

    Attributes:
        name: a short name for lists.
        before: arguments of `megalaunch` before the number.
        after: those after it.
        numbers: of the tasks; () if none is left.
        final: arguments of `megalaunch` after all tasks; this command does itself what a lost task has left.
        directory: the directory of records and logs, seen by all machines; absolute.
        working_directory: of the commands; absolute.
        settings: the `launcher` section.
        devices_per_node: accelerators of each task; 0: it runs on CPUs.
        device_resource: these as a resource of Kubernetes; "": none, or no name is known.
    """

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    numbers: tuple[int, ...]
    final: tuple[str, ...]
    directory: Path
    working_directory: Path
    settings: LauncherSpec
    devices_per_node: int = 0
    device_resource: str = ""

    def arguments(self, number: int | str) -> tuple[str, ...]:
        """Return the arguments of `megalaunch` for a task."""
        return (*self.before, str(number), *self.after)

    def job(self, arguments: tuple[str, ...]) -> Job:
        """Return a command of the set as a job of one node."""
        where = self.directory, self.working_directory
        return Job(self.name, 1, self.devices_per_node, arguments, *where, self.settings, self.device_resource)


def task_number(log: Path) -> int:
    """Return the number at the end of the name of a task's log, after `_`; 0 without one."""
    digits = log.stem.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else 0


@dataclass(frozen=True)
class FailedTask:
    """The first task that failed: its number, the exit code of its command, and the log; None: it was printed here."""

    number: int
    exit_code: int
    log: Path | None = None


class TaskRunner(Protocol):
    """Runs tasks that end with this process; the final command is the caller's."""

    attached: Literal[True]

    def manifest(self, tasks: TaskSet) -> str:
        """Return exactly what would run. Raises LauncherError."""

    def run(self, tasks: TaskSet, note: Callable[[str], None], started: Callable[[], None]) -> FailedTask | None:
        """Run all tasks; None if all have succeeded. Raises LauncherError, StopBeforeLaunch with no task left.

        Args:
            note: called with each note to the user.
            started: called once, when the record is written.
        """


class TaskScheduler(Protocol):
    """Submits tasks and their final command, which live on without this process."""

    attached: Literal[False]

    def manifest(self, tasks: TaskSet) -> str:
        """Return exactly what would be submitted. Raises LauncherError."""

    def submit(self, tasks: TaskSet) -> JobRecord:
        """Let the scheduler check the tasks, submit them and write their record. Raises LauncherError, OSError."""
