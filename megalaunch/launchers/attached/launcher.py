"""Launchers whose jobs end with the process that started them: its record names that process."""

from __future__ import annotations

import signal
import socket
from abc import ABC, abstractmethod
from pathlib import Path

from megalaunch.launchers.attached.job import AttachedJob, NodeStarter
from megalaunch.launchers.attached.own_record import own_record, write_attached_record
from megalaunch.launchers.launcher import Job, JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord
from megalaunch.launchers.tasks import task_number
from megalaunch.process import Process, is_alive, send_signal
from megalaunch.rundir.paths import RunDirectory


class AttachedLauncher(ABC):
    """Starts an agent on each node; the job ends with this process.

    Attributes:
        name: `launcher.name`.
    """

    attached = True
    name: str

    def __init__(self) -> None:
        self._job: AttachedJob | None = None

    @abstractmethod
    def manifest(self, job: Job) -> str:
        """Return what each node gets."""

    @abstractmethod
    def starter(self, job: Job, shared_text: str) -> NodeStarter:
        """Return what starts the nodes of a job; `shared_text` is that of job.json."""

    def submit(self, job: Job) -> JobRecord:
        """Write the record, which every node must see, and start all nodes."""
        directory = RunDirectory(job.directory)
        record = own_record(self.name, job.name, job.nodes, str(directory.node_log("*")))
        write_attached_record(directory, record)
        text = directory.job.read_text(encoding="utf-8")
        try:
            self._job = AttachedJob(job, self.starter(job, text))
        except BaseException:
            directory.job.unlink()  # nothing was started
            raise
        return record

    def status(self, record: JobRecord) -> JobStatus:
        """Return the state of a job of this process; of another's, whether that process lives."""
        if self._job is not None:
            return self._job.status
        if is_alive(_holder(record)):
            return JobStatus("running", "RUNNING", f"held by process {record.id} on {record.host}")
        return JobStatus("ended", "ENDED", f"process {record.id} on {record.host} has ended")

    def stop(self, record: JobRecord, at_once: bool) -> str:
        """Pass the request to the nodes, or by a signal to the process that holds the job."""
        if self._job is not None:
            self._job.stop(at_once)
        else:
            holder = _holder(record)
            sent = send_signal(holder, signal.SIGTERM)
            if sent and at_once and not record.is_task_set:  # tasks save nothing: a second signal would end no sooner
                send_signal(holder, signal.SIGINT)
        saves = not (at_once or record.is_task_set)
        return f"job {record.id} {'saves a checkpoint and ends' if saves else 'ends'}"

    def output(self, record: JobRecord) -> list[Path]:
        """Return the output of each node or task, in their order, and of the command if it is in the background."""
        pattern = Path(record.output)
        if record.is_task_set:
            paths = sorted(pattern.parent.glob(pattern.name), key=task_number)
        else:
            paths = [pattern.with_name(pattern.name.replace("*", str(node))) for node in range(record.nodes)]
        command = pattern.with_name(RunDirectory(Path()).command_log.name)
        return [path for path in (*paths, command) if path.exists()]

    def new_lines(self, record: JobRecord) -> list[str]:
        """Return nothing: the output of the nodes comes to this machine."""
        return []


def _holder(record: JobRecord) -> Process:
    """Return the process that holds a job. Raises LauncherError on another machine than that process's."""
    if record.host != socket.gethostname():
        message = f"the job was started on {record.host}, by process {record.id}"
        raise LauncherError(message, f"type the command on {record.host}")
    return Process(int(record.id), record.started)
