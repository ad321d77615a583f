"""A stop signal ends the tasks that a command holds before it ends the command."""

import os
import signal
import time
from pathlib import Path

import pytest
import typer

from megalaunch.launchers.record import JobRecord, write_record
from megalaunch.launchers.tasks import FailedTask, TaskSet
from megalaunch.rundir.outcome import Outcome, read_outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs import task_set
from megalaunch.runs.task_set import TaskProgress, run_tasks
from megalaunch.schema.launcher import LauncherSpec

PROGRESS = TaskProgress(complete=lambda: 0, finished=lambda: False, kind="shard")


def recorded(folder: Path) -> RunDirectory:
    """A folder with the record of a job that has ended, and the outcome of an earlier one."""
    directory = RunDirectory(folder)
    directory.root.mkdir()
    write_record(directory.job, JobRecord("slurm", 1, "preprocess", 1, 0.0, "here", "", tasks=1))
    write_outcome(directory.outcome, Outcome(0, "an earlier one", 0))
    return directory


class StoppedTasks:
    """Tasks whose command gets a signal while they run."""

    attached = True

    def __init__(self, number: signal.Signals) -> None:
        self.number, self.ended = number, False

    def run(self, tasks, note, started):
        started()
        try:
            os.kill(os.getpid(), self.number)
            time.sleep(10)
        finally:
            self.ended = True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_stop_signal_ends_the_tasks_first(number, code, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(number)
    launcher = StoppedTasks(number)
    monkeypatch.setattr(task_set, "check_task_launcher", lambda settings, detach: launcher)
    directory = recorded(tmp_path / "job")
    tasks = TaskSet("preprocess", ("preprocess",), (), (0,), (), directory.root, tmp_path, LauncherSpec(name="ssh"))
    with pytest.raises(typer.Exit) as ended:
        run_tasks(tasks, False, PROGRESS, print)
    assert (ended.value.exit_code, launcher.ended) == (code, True)
    assert capsys.readouterr().err == "interrupted; finished shards are kept; the same command continues\n"
    assert signal.getsignal(number) == before
    reason = "interrupted; finished shards are kept; the same command continues"
    assert read_outcome(directory.outcome) == Outcome(code, reason, 0)


@pytest.mark.parametrize("failed", [FailedTask(3, 5), None])
def test_the_outcome_is_that_of_the_last_command(failed, tmp_path, monkeypatch):
    class Launcher:
        attached = True

        def run(self, tasks, note, started):
            started()
            assert not directory.outcome.exists()
            return failed

    directory = recorded(tmp_path / "job")
    monkeypatch.setattr(task_set, "check_task_launcher", lambda settings, detach: Launcher())
    tasks = TaskSet("preprocess", ("preprocess",), (), (3,), (), directory.root, tmp_path, LauncherSpec(name="ssh"))
    assert run_tasks(tasks, False, PROGRESS, print) == failed
    expected = Outcome(5, "shard 3 failed; finished shards are kept; the same command continues", 0)
    assert read_outcome(directory.outcome) == (expected if failed else None)
