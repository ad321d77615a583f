"""The fencing token: one attempt at a time may change a run directory, the newest, and no window is left between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import contextmanager

import pytest
from launching import wait_until

from megalaunch.process import find_process, is_alive, is_stopped
from megalaunch.rundir import fence as fences
from megalaunch.rundir.fence import Fence, Superseded
from megalaunch.rundir.jsonl import append_line, read_lines


def claimed(path, restarted=False):
    fence = Fence(path, restarted)
    fence.claim()
    return fence


def test_an_attempt_has_the_right_until_a_later_one_claims_it(tmp_path):
    path = tmp_path / "attempts.jsonl"
    first = claimed(path)
    with first.hold():
        first.check()
    second = claimed(path)
    assert [record["attempt"] for record in read_lines(path)] == [first.number, second.number] == [1, 2]
    name = rf"attempt 2 \(process {os.getpid()} on {socket.gethostname()}\) has .* run: attempt 1 changes nothing"
    with pytest.raises(Superseded, match=name):
        first.check()
    with pytest.raises(Superseded, match=name), first.hold():
        pytest.fail("the body runs")
    with second.hold():
        second.check()


def test_an_incomplete_line_of_a_killed_claim_counts_for_nothing(tmp_path):
    path = tmp_path / "attempts.jsonl"
    first = claimed(path)
    with path.open("a") as file:
        file.write('{"attempt": 7')
    first.check()
    assert claimed(path).number == 2


def test_an_attempt_that_is_not_known_yet_is_refused_nothing(tmp_path):
    fence = Fence(tmp_path / "attempts.jsonl")
    with fence.hold():
        fence.check()
    assert list(tmp_path.iterdir()) == []


def test_workers_that_their_agent_restarts_do_not_take_the_run_back(tmp_path):
    path = tmp_path / "attempts.jsonl"
    claimed(path)
    assert claimed(path, restarted=True).number == 2  # of the same agent, the parent of this process
    if (child := os.fork()) == 0:
        claimed(path)  # of another agent: this process
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(Superseded, match="the workers of this agent change nothing more and end"):
        claimed(path, restarted=True)


@contextmanager
def stopped_while_it_publishes(path):
    """A process of attempt 1 that has stopped itself under the lock."""
    if (child := os.fork()) == 0:
        with claimed(path).hold():
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_no_attempt_starts_while_another_publishes(tmp_path, monkeypatch):
    path = tmp_path / "attempts.jsonl"
    monkeypatch.setattr(fences, "HELD_SECONDS", 0.1)
    name = r"is locked by attempt 1 \(process \d+ on .*\): end that process"
    with stopped_while_it_publishes(path), pytest.raises(OSError, match=name):
        claimed(path)
    assert claimed(path).number == 2  # the kernel has released the lock


def test_a_process_that_is_stopped_while_it_publishes_is_killed(tmp_path, monkeypatch):
    path = tmp_path / "attempts.jsonl"
    monkeypatch.setattr(fences, "STOPPED_SECONDS", 0.05)
    with stopped_while_it_publishes(path) as child:
        fence = claimed(path)
        assert not is_alive(find_process(child))
    assert fence.number == 2
    name = f"attempt 1 (process {child} on {socket.gethostname()})"
    assert fence.killed == f"{name} was stopped while it changed files of the run, and has been killed"
    assert claimed(path).killed == ""


@pytest.fixture
def bystander():
    """A process that has nothing to do with the run."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("case", ["another machine", "another process that runs", "another process that is stopped"])
def test_a_process_that_does_not_hold_the_lock_is_not_killed(case, bystander, tmp_path, monkeypatch):
    """The newest attempt's pid is one of another machine, or has been given to another process since."""
    path = tmp_path / "attempts.jsonl"
    monkeypatch.setattr(fences, "STOPPED_SECONDS", 0.05)
    monkeypatch.setattr(fences, "HELD_SECONDS", 0.3)
    if case.endswith("stopped"):
        bystander.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(find_process(bystander.pid)))
    with stopped_while_it_publishes(path) as child:
        far = case == "another machine"
        host, pid = ("elsewhere", child) if far else (socket.gethostname(), bystander.pid)
        append_line(path, {"attempt": 2, "host": host, "pid": pid})
        with pytest.raises(OSError, match="is locked by attempt 2"):
            claimed(path)
        assert all(is_alive(find_process(pid)) for pid in (child, bystander.pid))
