"""The jobs of runs: find the records below a folder, ask for the state of each, stop one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalaunch.format.paths import display_path
from megalaunch.launch.directory import run_is_locked
from megalaunch.launch.lock import Holder, read_holder
from megalaunch.launchers.launcher import JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord, read_record
from megalaunch.launchers.select_launcher import select_launcher
from megalaunch.process import Process, send_signal
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

_NOT_RUNS = ("checkpoints", "logs", "plots", "profiles", "origin")


@dataclass(frozen=True)
class RunJob:
    """A run and where it runs.

    Attributes:
        record: of its newest job; None: it was not submitted, or continues without one.
        holder: the process that holds the directory of a run without a job; None: no process does.
        status: of the job, or of that process.
    """

    directory: RunDirectory
    record: JobRecord | None
    holder: Holder | None
    status: JobStatus


def find_job(directory: RunDirectory) -> RunJob:
    """Return the newest job of a run and its state; a scheduler that does not answer is a reason in the state."""
    record = read_record(directory.job)
    status = JobStatus("ended", "not running") if record is None else _ask(record)
    if status.phase == "ended" and run_is_locked(directory) and (holder := read_holder(directory.lock)) is not None:
        return RunJob(directory, None, holder, JobStatus("running", holder.describe()))
    return RunJob(directory, record, None, status)


def _ask(record: JobRecord) -> JobStatus:
    try:
        return select_launcher(record.launcher).status(record)
    except LauncherError as error:
        return JobStatus("unknown", "unknown", str(error))


def find_jobs(folder: Path) -> Iterator[RunJob]:
    """Yield the newest job of every run below a folder that was submitted, in order of their paths."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_RUNS)
        if RunDirectory(Path(path)).job.name in files:
            folders.clear()
            yield find_job(RunDirectory(Path(path)))


def stop_job(job: RunJob, at_once: bool) -> str:
    """Stop a run, wherever it runs; return what happens in one sentence.

    Raises:
        LauncherError: it cannot be stopped from here.
    """
    if job.record is not None and job.status.phase in ("pending", "running"):
        return select_launcher(job.record.launcher).stop(job.record, at_once)
    if job.holder is not None:
        return _stop_process(job.holder, at_once)
    outcome = read_outcome(job.directory.outcome) if job.record is None else None
    how = f": {outcome.reason}" if outcome is not None else f": {job.status}" if job.record is not None else ""
    raise LauncherError(f"{display_path(job.directory.root)} is not running{how}")


def _stop_process(holder: Holder, at_once: bool) -> str:
    if holder.host != socket.gethostname():
        raise LauncherError(f"the run belongs to {holder.describe()}", f"type the command on {holder.host}")
    process = Process(holder.pid, holder.started)
    sent = send_signal(process, signal.SIGTERM)
    if sent and at_once:  # the second request ends the workers without a checkpoint
        send_signal(process, signal.SIGINT)
    return f"process {holder.pid} {'ends' if at_once else 'saves a checkpoint and ends'}"
