"""The state of a run that was submitted as a job, and then continued on this machine."""

from __future__ import annotations

import os

import pytest

from megalaunch.launch.lock import RunLock
from megalaunch.launchers.launcher import JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord, write_record
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs import job_states
from megalaunch.runs.job_states import find_job, stop_job


class EndedJob:
    def status(self, record: JobRecord) -> JobStatus:
        return JobStatus("ended", "COMPLETED")


def test_a_run_that_continues_here_after_its_job_is_running(tmp_path, monkeypatch):
    """Otherwise `stop` answers that it is not running."""
    monkeypatch.setattr(job_states, "select_launcher", lambda name: EndedJob())
    directory = RunDirectory(tmp_path)
    write_record(directory.job, JobRecord("slurm", 7, "run", 1, 0.0, "login", "out"))
    assert (find_job(directory).status.phase, find_job(directory).holder) == ("ended", None)
    lock = RunLock(directory.lock)
    try:
        job = find_job(directory)
    finally:
        lock.release()
    assert job.status.phase == "running"
    assert job.holder is not None
    assert job.holder.pid == os.getpid()


def test_stop_says_how_a_run_without_a_job_ended(tmp_path):
    directory = RunDirectory(tmp_path)
    with pytest.raises(LauncherError, match=f"^{tmp_path} is not running$"):
        stop_job(find_job(directory), at_once=False)
    write_outcome(directory.outcome, Outcome(ExitCode.DONE, "finished all 40 steps", 40))
    with pytest.raises(LauncherError, match=f"^{tmp_path} is not running: finished all 40 steps$"):
        stop_job(find_job(directory), at_once=False)
