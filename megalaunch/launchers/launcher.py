"""The interface of a launcher: a job goes in; its record, its state and its logs come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from megalaunch.launchers.record import JobRecord
from megalaunch.schema.launcher import LauncherSpec

Phase = Literal["pending", "running", "ended", "forgotten", "unknown"]
"""`forgotten`: the scheduler has no record of the job any more: only the files of the run tell how it ended.
`unknown`: the scheduler cannot be asked, and the job may run; no launcher returns it."""


class LauncherError(Exception):
    """The place where the job should run refuses it or does not answer; `fix` says what to do ("": nothing known)."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix

    def text(self) -> str:
        """Return the message, and the fix on a line of its own."""
        return f"{self}\nfix:  {self.fix}" if self.fix else str(self)


@dataclass(frozen=True)
class Job:
    """A command that runs once on each of several nodes at the same time.

    Attributes:
        name: a short name for lists.
        nodes: number of nodes.
        devices_per_node: accelerators of each node; 0: a run on CPUs.
        arguments: those of `megalaunch`, such as ("train", "recipe=tiny").
        directory: the directory of the work, seen by all nodes; absolute.
        working_directory: of the command; absolute.
        settings: the `launcher` section.
        device_resource: the accelerators as a resource of Kubernetes; "": none, or no name is known.
        fewer: the numbers of nodes on which the job may continue after it has lost some, with the arguments for each.
    """

    name: str
    nodes: int
    devices_per_node: int
    arguments: tuple[str, ...]
    directory: Path
    working_directory: Path
    settings: LauncherSpec
    device_resource: str = ""
    fewer: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def on_nodes(self, nodes: int) -> Job:
        """Return the job on all its nodes, or on one of the numbers in `fewer`."""
        return self if nodes == self.nodes else replace(self, nodes=nodes, arguments=self.fewer[nodes])


@dataclass(frozen=True)
class JobStatus:
    """The state of a job.

    Attributes:
        state: the scheduler's own word, such as PENDING.
        reason: why it is in this state, in the scheduler's words; "" without one.
        nodes: names of its nodes; "" before it has some.
        restarts: how often it was queued again.
        exit_code: of the command, once it has ended; None: not known to the scheduler.
    """

    phase: Phase
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: int | None = None

    def __str__(self) -> str:
        details = [self.reason, f"on {self.nodes}" if self.nodes else ""]
        details += [f"restart {self.restarts}"] if self.restarts else []
        shown = ", ".join(detail for detail in details if detail)
        return f"{self.state} ({shown})" if shown else self.state


class Launcher(Protocol):
    """Starts jobs in one kind of place, and knows what became of them.

    Attributes:
        attached: a job ends with the process that submitted it, which forwards stop signals.
    """

    attached: bool

    def manifest(self, job: Job) -> str:
        """Return exactly what `submit` would submit, for people and for --dry-run. Raises LauncherError."""

    def submit(self, job: Job) -> JobRecord:
        """Let the place check the job, start it, and write its record. Raises LauncherError, OSError."""

    def status(self, record: JobRecord) -> JobStatus:
        """Return the state of a job. Raises LauncherError."""

    def stop(self, record: JobRecord, at_once: bool) -> str:
        """Ask a job to save and end, or end it at once; return what happens in one sentence. Raises LauncherError."""

    def output(self, record: JobRecord) -> list[Path]:
        """Return the files with the output of the job's commands, as far as they exist."""

    def new_lines(self, record: JobRecord) -> list[str]:
        """Return what node 0 has printed since the last call, for machines that do not see the run directory.

        [] where every machine that submits a job sees it. Raises LauncherError.
        """
