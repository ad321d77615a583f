"""The jobs of runs: find the records below a folder, ask for the state of each, stop one."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megalaunch.format.paths import display_path
from megalaunch.launch.directory import run_is_locked
from megalaunch.launch.lock import Holder, read_holder
from megalaunch.launchers.launcher import JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord, read_record
from megalaunch.launchers.select_launcher import select_launcher
from megalaunch.process import Process, send_signal
from megalaunch.rundir.outcome import EXIT_MEANINGS, NOT_RESTARTED, ExitCode, Outcome, read_outcome
from megalaunch.rundir.paths import RunDirectory

_NOT_RUNS = ("checkpoints", "logs", "plots", "profiles", "origin")
_SILENT_SECONDS = 5.0  # longer than an answer takes, also of a client that cannot connect


@dataclass(frozen=True)
class RunJob:
    """A run and where it runs.

    Attributes:
        record: of its newest job; None: it was not submitted, or continues without one.
        holder: the process that holds the directory of a run without a job; None: no process does.
        status: of the job, or of that process; of a job whose state its launcher does not tell, from the outcome.
        outcome: that of the job, or of the last launch of a run without one; None: it has written none.
    """

    directory: RunDirectory
    record: JobRecord | None
    holder: Holder | None
    status: JobStatus
    outcome: Outcome | None


def find_job(directory: RunDirectory) -> RunJob:
    """Return the newest job of a run and its state; a scheduler that does not answer is a reason in the state."""
    return _Inquiry().find(directory)


def find_jobs(folder: Path) -> Iterator[RunJob]:
    """Yield the newest job of every run below a folder that was submitted, in order of their paths."""
    inquiry = _Inquiry()
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_RUNS)
        if RunDirectory(Path(path)).job.name in files:
            folders.clear()
            yield inquiry.find(RunDirectory(Path(path)))


class _Inquiry:
    """Questions for the states of jobs. A cluster that took long to fail is not asked for further ones."""

    def __init__(self) -> None:
        self._silent: dict[tuple[str, tuple[str, ...]], JobStatus] = {}

    def find(self, directory: RunDirectory) -> RunJob:
        """Return the newest job of a run and its state."""
        record = read_record(directory.job)
        if record is None:
            status, outcome = JobStatus("ended", "not running"), read_outcome(directory.outcome)
        else:
            status, outcome = self._ask(record), read_outcome(directory.outcome, record.submitted)
        is_gone = status.phase in ("ended", "forgotten")
        if is_gone and run_is_locked(directory) and (holder := read_holder(directory.lock)) is not None:
            return RunJob(directory, None, holder, JobStatus("running", holder.describe()), None)
        if record is not None and outcome is not None:
            status = _with_outcome(record, status, outcome)
        return RunJob(directory, record, None, status, outcome)

    def _ask(self, record: JobRecord) -> JobStatus:
        cluster = record.launcher, record.options
        if cluster in self._silent:
            return self._silent[cluster]
        asked = time.monotonic()
        try:
            status = select_launcher(record.launcher).status(record)
        except LauncherError as error:
            status = JobStatus("unknown", "unknown", str(error))
            if time.monotonic() - asked > _SILENT_SECONDS:
                self._silent[cluster] = status
        return status


def _with_outcome(record: JobRecord, status: JobStatus, outcome: Outcome) -> JobStatus:
    """Return the state of a job with the end that its outcome tells, where its launcher does not know the job's end.

    Args:
        outcome: the job has written it.
    """
    ends_untold = status.phase == "ended" and select_launcher(record.launcher).attached
    if status.phase not in ("forgotten", "unknown") and not ends_untold:
        return status
    code = outcome.exit_code
    told = f"exit code {code} by {RunDirectory(Path()).outcome.name}"
    if status.phase == "unknown" and (code not in NOT_RESTARTED or code == ExitCode.PREEMPTED):
        return replace(status, reason=f"{status.reason}; its last attempt: {told}")  # it may have started again
    title = EXIT_MEANINGS[ExitCode(code)].title if code in list(ExitCode) else "ended"
    return JobStatus("ended", title, f"{told}; {status.reason or status.state}", status.nodes, exit_code=code)


def stop_job(job: RunJob, at_once: bool) -> str:
    """Stop a run, wherever it runs; return what happens in one sentence.

    Raises:
        LauncherError: it cannot be stopped from here.
    """
    if job.record is not None and job.status.phase in ("pending", "running", "unknown"):
        return select_launcher(job.record.launcher).stop(job.record, at_once)
    if job.holder is not None:
        return _stop_process(job.holder, at_once)
    how = f": {job.status}" if job.record is not None else f": {job.outcome.reason}" if job.outcome is not None else ""
    raise LauncherError(f"{display_path(job.directory.root)} is not running{how}")


def _stop_process(holder: Holder, at_once: bool) -> str:
    if holder.host != socket.gethostname():
        raise LauncherError(f"the run belongs to {holder.describe()}", f"type the command on {holder.host}")
    process = Process(holder.pid, holder.started)
    sent = send_signal(process, signal.SIGTERM)
    if sent and at_once:  # the second request ends the workers without a checkpoint
        send_signal(process, signal.SIGINT)
    return f"process {holder.pid} {'ends' if at_once else 'saves a checkpoint and ends'}"
