"""Independent tasks on hosts that are played: what becomes of a task whose host is lost between two of them."""

from __future__ import annotations

import os

import pytest
from fake_ssh import UNREACHED, make_ssh, on_host, playing_hosts

from megalaunch.launchers.launcher import LauncherError
from megalaunch.launchers.ssh import tasks as ssh_tasks
from megalaunch.launchers.tasks import TaskSet
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.ssh import SshSpec


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs three tasks on hosts a and b, where ssh does this; it returns the notes."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ssh_tasks, "LEASE_SECONDS", 0.1)
    answer = make_ssh(tmp_path / "bin")
    settings = LauncherSpec(name="ssh", ssh=SshSpec(hosts=("a", "b")))
    tasks = TaskSet("shards", ("preprocess", "--shard"), (), (0, 1, 2), (), tmp_path / "job", tmp_path, settings)

    def run(line):
        notes = []
        answer(line)
        assert ssh_tasks.SshTasks().run(tasks, notes.append, lambda: None) is None
        return notes

    return run


def test_a_host_that_is_lost_between_two_tasks_gives_its_next_one_to_another(run):
    a = f"if test -e used; then touch lost; {UNREACHED}; else touch used; {playing_hosts(0)}; fi"
    b = f"until test -e lost; do sleep 0.05; done; {playing_hosts(0)}"
    first, *others = run(on_host("a", a, b))
    assert first == "task 0 is complete on a (1 of 3)"
    assert set(others) == {
        "task 2 is run again: node 0 (a) is not reached: connect to host: No route to host",
        "task 1 is complete on b (2 of 3)",
        "task 2 is complete on b (3 of 3)",
    }


def test_a_host_that_never_ran_a_task_ends_the_command_with_the_fix(run):
    with pytest.raises(LauncherError, match=r"node 0 \(a\) is not reached") as error:
        run(on_host("a", UNREACHED, playing_hosts(0)))
    assert "check its name in launcher.ssh.hosts" in error.value.fix
