"""What the agent of a node records about workers that ended without a word."""

from __future__ import annotations

import signal

import pytest
from launching import events_of

from megalaunch.engine.agent.failed_workers import FailedWorkers, log_exit_codes
from megalaunch.launch.agent import exit_codes
from megalaunch.platform.cgroups import OomKill, OomKills
from megalaunch.rundir.environment import ATTEMPT_VARIABLE, ROUND_VARIABLE
from megalaunch.rundir.events import record_event
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter

CAUSE = {"rank": 0, "attempt": 2, "exception": "ValueError", "message": "bad"}
LOST = {"rank": 0, "attempt": 2, "exception": "RuntimeError", "message": "Connection closed by peer"}


@pytest.fixture
def directory(tmp_path, monkeypatch) -> RunDirectory:
    """A run whose rank 1 was at step 7 of attempt 2, and whose earlier launch had failures too."""
    monkeypatch.setenv(ATTEMPT_VARIABLE, "1")
    monkeypatch.setenv(ROUND_VARIABLE, "2")
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    progress = ProgressWriter(directory.progress(1), 1, attempt=2)
    progress.coordinates = "dp1"
    progress.report("step", 7)
    record_event(directory, "worker_failed", **CAUSE)
    return directory


def recorded(directory: RunDirectory, codes: dict[int, int | None], *told: dict[str, object]) -> list[tuple]:
    """What is recorded after events of workers; each of them by rank, coordinates, phase, step, exception, message."""
    failed = FailedWorkers(directory)
    for event in told:
        record_event(directory, "worker_failed", **event)
    before = len(events_of(directory, "worker_failed"))
    failed.record(codes)
    written = events_of(directory, "worker_failed")[before:]
    assert all(event["attempt"] == 2 for event in written)
    keys = ("rank", "coordinates", "phase", "step", "exception", "message")
    return [tuple(event[key] for key in keys) for event in written]


def test_a_signal_is_recorded_with_the_place_of_its_worker(directory):
    segfault = "a crash in native code: invalid memory access"
    assert recorded(directory, {1: -11, 0: 1}, LOST) == [(1, "dp1", "step", 7, "SIGSEGV", segfault)]
    before_its_record = (0, "", "starting", 0, "exit code 3", "no exception was reported")
    assert recorded(directory, {0: 3}) == [before_its_record]


def test_a_kill_for_memory_is_named_once(directory, monkeypatch):
    kills = [None, OomKill(512 * 10**6, 511 * 10**6)]
    monkeypatch.setattr(OomKills, "since", lambda self: kills.pop())
    (killed,) = recorded(directory, {1: -9})
    assert killed[4:] == ("SIGKILL", "killed by the kernel for memory: limit of its cgroup 512.0 MB, peak 511.0 MB")
    (killed,) = recorded(directory, {1: -9})
    assert killed[5] == "killed from outside, possibly by the out-of-memory killer"


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ({1: -9}, [CAUSE]),  # the cause is known: a hang, whose workers the launchers kill
        ({0: 1}, [LOST]),  # its own words
        ({1: -15, 0: 0}, []),  # ended by the agent
        ({1: 75}, []),  # superseded: it changes nothing any more
    ],
)
def test_what_is_no_cause_is_not_recorded(directory, codes, told):
    assert recorded(directory, codes, *told) == []


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        (1, "rank 1 failed at step 7: SIGKILL: gone"),
        (0, "the workers of a node failed"),
    ],  # of the last attempt, or none
)
def test_a_restart_is_recorded_with_the_cause_of_the_last_attempt(directory, attempt, reason):
    for event in (LOST, {"rank": 1, "exception": "SIGKILL", "message": "gone"}):
        record_event(directory, "worker_failed", **{**event, "attempt": attempt, "step": 7})
    FailedWorkers(directory).record_restart()
    (restart,) = events_of(directory, "restart")
    assert (restart["attempt"], restart["reason"], restart["pause_seconds"]) == (2, reason, 0.0)


def test_workers_that_later_ones_have_superseded_record_no_restart(directory):
    failed = FailedWorkers(directory)
    failed.record({0: 75, 1: -15})
    failed.record_restart()
    assert events_of(directory, "restart") == []
    failed.record({0: 1, 1: -15})
    failed.record_restart()
    assert len(events_of(directory, "restart")) == 1


def test_a_launcher_reads_the_exit_codes_of_all_workers(capsys, tmp_path):
    """torch logs the first failure that it sees, which may be that of a rank that lost its peer."""
    log_exit_codes({0: 100, 1: 101, 2: 102, 3: 103}, {0: 1, 1: -signal.SIGTERM, 2: None, 3: -signal.SIGKILL})
    (tmp_path / "agent.log").write_text(capsys.readouterr().err)
    assert exit_codes(tmp_path / "agent.log") == {100: 1, 101: -15, 103: -9}
