"""A stop signal ends the tasks that a command holds before it ends the command."""

import os
import signal
import time

import pytest
import typer

from megalaunch.launchers.tasks import TaskSet
from megalaunch.runs import task_set
from megalaunch.runs.task_set import TaskProgress, run_tasks
from megalaunch.schema.launcher import LauncherSpec

PROGRESS = TaskProgress(complete=lambda: 0, finished=lambda: False, kind="shard")


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
    tasks = TaskSet("preprocess", ("preprocess",), (), (0,), (), tmp_path / "job", tmp_path, LauncherSpec(name="ssh"))
    with pytest.raises(typer.Exit) as ended:
        run_tasks(tasks, False, PROGRESS, print)
    assert (ended.value.exit_code, launcher.ended) == (code, True)
    assert capsys.readouterr().err == "interrupted; finished shards are kept; the same command continues\n"
    assert signal.getsignal(number) == before
