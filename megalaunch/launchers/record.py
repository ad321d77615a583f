"""The record of a submitted job: `job.json` in the directory of its work. There is no other list of jobs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megalaunch.fs import write_file_atomically


@dataclass(frozen=True)
class JobRecord:
    """Where a job was submitted.

    Attributes:
        launcher: `launcher.name` of the job.
        id: the number or name that the scheduler gave; of the process that holds the job, where there is no scheduler.
        name: the job's.
        nodes: number of nodes.
        submitted: seconds since 1970.
        host: the machine on which it was submitted.
        started: start of the process `id`, in clock ticks since boot; 0: `id` is not a process.
        output: the file with the output of the job's commands.
        options: of the scheduler's client, such as the name of the cluster that has the job.
        tasks: number of independent tasks; 0: the job is one command on its nodes.
        final: the job that runs the final command after all tasks: `id` if the last of them does; 0: no job does.
    """

    launcher: str
    id: int | str
    name: str
    nodes: int
    submitted: float
    host: str
    output: str
    started: int = 0
    options: tuple[str, ...] = ()
    tasks: int = 0
    final: int | str = 0

    @property
    def is_task_set(self) -> bool:
        """Whether the job is a set of independent tasks, or what is left of one."""
        return bool(self.tasks or self.final)


def write_record(path: Path, record: JobRecord) -> None:
    """Write a record. Raises OSError."""
    write_file_atomically(path, json.dumps(asdict(record), indent=2))


def read_record(path: Path) -> JobRecord | None:
    """Return a record; None if there is no readable one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return JobRecord(**{**values, "options": tuple(values.get("options", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
