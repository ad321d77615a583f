"""The launcher of node 0 after its agent has ended without an outcome of the workers."""

from __future__ import annotations

import os
import socket

import pytest
from launching import run_of, tiny_spec

from megalaunch.launch.local import Launch
from megalaunch.launch.lock import RunLock
from megalaunch.launch.node import run_first_node
from megalaunch.launch.run_state import ThroughputBasis
from megalaunch.launch.stop import StopSignals
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.outcome import ExitCode, read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


class CrashedAgent:
    """An agent that has ended with code 1; `attempts` claims of (host, agent) come in its time."""

    command = ("agent",)
    pid = 12

    def __init__(self, path, attempts):
        self.path, self.attempts = path, attempts

    def run(self, stop, storage, poll):
        for number, (host, agent) in enumerate(self.attempts, 2):
            append_line(self.path, {"attempt": number, "host": host, "pid": 99, "agent": agent})
        return 1


class FailedWorker(CrashedAgent):
    """An agent that has ended with code 1 after workers of two attempts have told their errors."""

    def run(self, stop, storage, poll):
        tell_failure(self.path, 1, "KeyError", attempt=0, at=4e9)  # by a clock that is ahead
        tell_failure(self.path, 1, "ValueError", attempt=1, at=5.0)
        return 1


class StuckWorker(CrashedAgent):
    """An agent whose worker fails for the third time at the same step, after the attempts of two earlier agents."""

    def run(self, stop, storage, poll):
        tell_failure(self.path, 1, "ValueError", attempt=2, at=5.0)
        ProgressWriter(RunDirectory(self.path.parent).progress(1), 1, attempt=2).report("step", 3)
        return 1


class KilledWorker(CrashedAgent):
    """An agent that has ended with code 1: its first workers hung, one of the next ones was killed without a word."""

    def run(self, stop, storage, poll):
        tell_failure(self.path, 1, "hang", attempt=0, at=5.0)
        directory = RunDirectory(self.path.parent)
        for rank in (0, 1):
            ProgressWriter(directory.progress(rank), rank, attempt=rank).report("step", 3)  # rank 0 did not come back
        return 1


def tell_failure(path, rank, exception, attempt, at):
    failed = {"rank": rank, "coordinates": "dp1", "phase": "step", "step": 3, "exception": exception, "message": "no"}
    append_line(path, {"time": at, "event": "worker_failed", "attempt": attempt, **failed})


class Unannounced:
    def run_is_ready(self):
        pass


def crash(folder, *attempts):
    """Let the agent crash in a run whose first attempt another machine made earlier."""
    directory = run_of(folder)
    directory.root.mkdir()
    append_line(directory.attempts, {"attempt": 1, "host": "before", "pid": 1, "agent": 1})
    launch = Launch(tiny_spec(), directory, RunLock(directory.lock), (), ThroughputBasis(10**9, 2, 1e12), 1)
    with StopSignals() as stop:
        agent = CrashedAgent(directory.attempts, attempts)
        result = run_first_node(launch, agent, Unannounced(), stop, lambda view: None)
    return result.outcome, read_outcome(directory.outcome)


def begin(folder):
    """An earlier launch of the run, which failed."""
    run_of(folder).root.mkdir()
    tell_failure(run_of(folder).events, 0, "OSError", attempt=2, at=4e9)


def fail(folder, agent):
    """Let workers fail in a run that earlier launches may have begun; the outcome."""
    directory = run_of(folder)
    launch = Launch(tiny_spec(), directory, RunLock(directory.lock), (), ThroughputBasis(10**9, 2, 1e12), 1)
    with StopSignals() as stop:
        return run_first_node(launch, agent(directory.events, ()), Unannounced(), stop, lambda view: None).outcome


HERE = (socket.gethostname(), CrashedAgent.pid)


@pytest.mark.parametrize("attempts", [(), (HERE,), (HERE, HERE)])
def test_the_launcher_writes_the_outcome_of_its_own_attempts(tmp_path, attempts):
    outcome, written = crash(tmp_path, *attempts)
    assert outcome.exit_code == ExitCode.CRASH
    assert written == outcome


def test_the_failure_of_the_newest_attempt_is_named_whatever_the_clocks_say(tmp_path):
    begin(tmp_path)
    assert fail(tmp_path, FailedWorker).reason == "rank 1 (dp1): ValueError: no"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (["ValueError", "ValueError"], ExitCode.NO_PROGRESS),
        (["ValueError", "KeyError"], ExitCode.CRASH),
        (["ValueError"], ExitCode.CRASH),
        (["ValueError", None], ExitCode.CRASH),  # a node was lost
    ],
)
def test_the_same_failure_of_three_attempts_in_a_row_is_no_progress(tmp_path, before, expected):
    directory = run_of(tmp_path)
    directory.root.mkdir()
    for attempt, exception in enumerate(before):
        record_event(directory, "launch")
        if exception:
            tell_failure(directory.events, 1, exception, attempt, at=4e9)
    assert fail(tmp_path, StuckWorker).exit_code == expected


def test_an_earlier_attempt_is_not_named_for_one_without_an_event(tmp_path):
    begin(tmp_path)
    outcome = fail(tmp_path, KilledWorker)
    assert outcome.exit_code == ExitCode.CRASH
    assert outcome.reason == "the agent: exit code 1: no worker reported an error"


@pytest.mark.parametrize("other", [("elsewhere", CrashedAgent.pid), (HERE[0], os.getpid())])
def test_a_launcher_whose_attempt_is_superseded_writes_no_outcome(tmp_path, other):
    outcome, written = crash(tmp_path, HERE, other)
    assert written is None
    assert outcome.exit_code == ExitCode.PREEMPTED
    assert "attempt 3 (process 99 on " in outcome.reason
    assert " has taken over the run: " in outcome.reason
