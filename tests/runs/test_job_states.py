"""The state of a run that was submitted as a job: from its launcher, else from its outcome or its lock."""

from __future__ import annotations

import os
import time

import pytest

from megalaunch.launch.lock import RunLock
from megalaunch.launchers.launcher import JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord, write_record
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs import job_states
from megalaunch.runs.job_states import find_job, find_jobs, stop_job


class Cluster:
    """A launcher that answers what it is told, after some time."""

    attached = False

    def __init__(self, answer: JobStatus | str, seconds: float = 0.0) -> None:
        self.answer, self.seconds = answer, seconds
        self.asked: list[int | str] = []

    def status(self, record: JobRecord) -> JobStatus:
        self.asked.append(record.id)
        time.sleep(self.seconds)
        if isinstance(self.answer, str):
            raise LauncherError(self.answer)
        return self.answer

    def stop(self, record: JobRecord, at_once: bool) -> str:
        raise LauncherError("it cannot be stopped", "try again")


@pytest.fixture
def asks(monkeypatch):
    """Let a launcher be asked for the state of every job."""

    def use(cluster: Cluster) -> Cluster:
        monkeypatch.setattr(job_states, "select_launcher", lambda name: cluster)
        return cluster

    return use


def submitted(directory: RunDirectory, before: float = 60.0, number: int = 7, options: tuple[str, ...] = ()) -> None:
    """Write the record of a job that was submitted some seconds ago."""
    directory.root.mkdir(parents=True, exist_ok=True)
    record = JobRecord("slurm", number, "run", 1, time.time() - before, "login", "out", options=options)
    write_record(directory.job, record)


GONE = JobStatus("forgotten", "not known to Slurm any more")
DELETED = JobStatus("forgotten", "DELETED", "not known to Kubernetes any more")
DOWN = "scontrol did not answer in 60 s"


@pytest.mark.parametrize(
    ("answer", "code", "phase", "shown"),
    [
        (GONE, 0, "ended", "completed (exit code 0 by outcome.json; not known to Slurm any more)"),
        (GONE, 5, "ended", "a worker crashed (exit code 5 by outcome.json; not known to Slurm any more)"),
        (GONE, 99, "ended", "ended (exit code 99 by outcome.json; not known to Slurm any more)"),
        (DELETED, 0, "ended", "completed (exit code 0 by outcome.json; not known to Kubernetes any more)"),
        (DOWN, 0, "ended", f"completed (exit code 0 by outcome.json; {DOWN})"),
        (DOWN, 3, "ended", f"the data cannot be used (exit code 3 by outcome.json; {DOWN})"),
        # The script of the job restarts it after these, or Slurm queues it again.
        (DOWN, 5, "unknown", f"unknown ({DOWN}; its last attempt: exit code 5 by outcome.json)"),
        (DOWN, 75, "unknown", f"unknown ({DOWN}; its last attempt: exit code 75 by outcome.json)"),
        (JobStatus("running", "COMPLETING"), 0, "running", "COMPLETING"),
        (JobStatus("ended", "NODE_FAIL"), 5, "ended", "NODE_FAIL"),
    ],
)
def test_the_outcome_tells_how_a_job_ended_that_its_launcher_does_not_know(tmp_path, asks, answer, code, phase, shown):
    asks(Cluster(answer))
    directory = RunDirectory(tmp_path)
    submitted(directory)
    write_outcome(directory.outcome, Outcome(code, "because", 4))
    job = find_job(directory)
    assert (job.status.phase, str(job.status)) == (phase, shown)
    assert job.outcome == Outcome(code, "because", 4)


def test_a_job_that_ended_with_its_process_tells_how(tmp_path, asks):
    cluster = asks(Cluster(JobStatus("ended", "ENDED", "process 7 on login has ended")))
    cluster.attached = True
    directory = RunDirectory(tmp_path)
    submitted(directory)
    assert str(find_job(directory).status) == "ENDED (process 7 on login has ended)"
    write_outcome(directory.outcome, Outcome(4, "the disk is full", 4))
    title = "a checkpoint could not be saved or loaded, or the run directory is not writable"
    assert str(find_job(directory).status) == f"{title} (exit code 4 by outcome.json; process 7 on login has ended)"


@pytest.mark.parametrize("answer", [GONE, DELETED, DOWN, JobStatus("pending", "PENDING")])
def test_the_outcome_of_an_earlier_job_is_not_that_of_the_newest(tmp_path, asks, answer):
    """A run that was resumed: until its new job starts, the outcome of the last one is there."""
    asks(Cluster(answer))
    directory = RunDirectory(tmp_path)
    write_outcome(directory.outcome, Outcome(0, "finished all 40 steps", 40))
    os.utime(directory.outcome, times=(time.time() - 100,) * 2)
    submitted(directory)
    job = find_job(directory)
    assert job.status == (JobStatus("unknown", "unknown", DOWN) if answer == DOWN else answer)
    assert job.outcome is None


def test_a_cluster_that_does_not_answer_is_asked_once(tmp_path, asks, monkeypatch):
    """A question takes a minute then, and a folder may have a hundred runs."""
    monkeypatch.setattr(job_states, "_SILENT_SECONDS", 0.2)
    cluster = asks(Cluster(DOWN, seconds=0.3))
    for number in (1, 2, 3):
        submitted(RunDirectory(tmp_path / f"run{number}"), number=number)
    submitted(RunDirectory(tmp_path / "there"), number=4, options=("--context=there",))
    write_outcome(RunDirectory(tmp_path / "run3").outcome, Outcome(0, "finished", 40))
    states = [str(job.status) for job in find_jobs(tmp_path)]
    assert states[:2] == [f"unknown ({DOWN})"] * 2
    assert states[2] == f"completed (exit code 0 by outcome.json; {DOWN})"
    assert cluster.asked == [1, 4]


@pytest.mark.parametrize(("answer", "seconds"), [(DOWN, 0.0), (GONE, 0.3), (JobStatus("running", "RUNNING"), 0.3)])
def test_others_are_asked_for_each_job(tmp_path, asks, monkeypatch, answer, seconds):
    """Also one that refuses at once, perhaps this job alone, or that answers late."""
    monkeypatch.setattr(job_states, "_SILENT_SECONDS", 0.2)
    cluster = asks(Cluster(answer, seconds))
    for number in (1, 2):
        submitted(RunDirectory(tmp_path / f"run{number}"), number=number)
    assert len(list(find_jobs(tmp_path))) == 2
    assert cluster.asked == [1, 2]


def test_a_stop_of_a_job_whose_state_is_unknown_asks_its_launcher(tmp_path, asks):
    asks(Cluster(DOWN))
    directory = RunDirectory(tmp_path)
    submitted(directory)
    with pytest.raises(LauncherError, match=r"^it cannot be stopped$"):
        stop_job(find_job(directory), at_once=False)
    write_outcome(directory.outcome, Outcome(0, "finished", 40))
    with pytest.raises(LauncherError, match=f"^{tmp_path} is not running: completed "):
        stop_job(find_job(directory), at_once=False)


@pytest.mark.parametrize("answer", [JobStatus("ended", "COMPLETED"), GONE])
def test_a_run_that_continues_here_after_its_job_is_running(tmp_path, asks, answer):
    """Otherwise `stop` answers that it is not running."""
    asks(Cluster(answer))
    directory = RunDirectory(tmp_path)
    write_record(directory.job, JobRecord("slurm", 7, "run", 1, 0.0, "login", "out"))
    assert (find_job(directory).status, find_job(directory).holder) == (answer, None)
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
