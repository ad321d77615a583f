"""The launcher on a fake worker under the real elastic agent: crashes, hangs, stops, and nothing left running."""

from __future__ import annotations

import os
import signal
import time

import pytest
from launching import (
    events_of,
    launched,
    run_fake,
    run_of,
    running,
    steps_of,
    tiny_spec,
    wait_until,
    worker_pids,
)

from megalaunch.launch.process import descendants
from megalaunch.rundir.outcome import ExitCode, read_outcome


def test_a_run_to_its_end(tmp_path):
    code, out, err = run_fake(tmp_path, tiny_spec())
    assert (code, err) == (0, "")
    directory = run_of(tmp_path)
    assert steps_of(directory) == list(range(1, 21))
    assert read_outcome(directory.outcome).step == 20
    assert "step 10/20  loss" in out
    assert "step 20/20  loss" in out
    assert "step  9/20" not in out
    assert directory.overrides.read_text() == "'a word'\n"
    assert "attempt 0 threads 1" in directory.rank_log(1).read_text()
    assert not directory.lock.exists()
    assert running(worker_pids(directory)) == []
    (launch,) = events_of(directory, "launch")
    assert launch["workers"] == 2
    assert launch["command"][-3:] == ["-m", "fake_worker", str(directory.spec)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill:1:7", "rank 1 (dp1) failed at step 7: SIGKILL"),
        ("raise:0:7", "rank 0 (dp0) failed at step 7: ValueError: told to fail"),
    ],
)
def test_a_crash_is_restarted(tmp_path, fault, said):
    code, out, err = run_fake(tmp_path, tiny_spec(), FAKE_FAULT=fault)
    assert (code, err) == (0, "")
    assert said in out
    (restart,) = events_of(run_of(tmp_path), "restart")
    assert restart["attempt"] == 1
    assert said.removesuffix(": told to fail") in restart["reason"]
    assert steps_of(run_of(tmp_path)) == list(range(1, 21))


def test_restarts_used_up(tmp_path):
    spec = tiny_spec(launcher__max_restarts=1)
    code, _, err = run_fake(tmp_path, spec, FAKE_FAULT="kill:1:7:9")
    assert code == ExitCode.CRASH
    lines = err.splitlines()
    assert len(lines) <= 15
    assert lines[0] == "megalaunch: a worker crashed, more often than launcher.max_restarts allows (exit code 5)"
    assert "rank 1 (dp1) on " in lines[1]
    assert "step 7, step (attempt 2)" in lines[2]
    assert "SIGKILL: killed from outside, possibly because memory ran out" in lines[3]
    assert str(run_of(tmp_path).rank_log(1)) in err
    outcome = read_outcome(run_of(tmp_path).outcome)
    assert (outcome.exit_code, outcome.step, outcome.details["rank"]) == (5, 6, 1)


def test_the_same_failure_three_times_is_no_progress(tmp_path):
    code, _, err = run_fake(tmp_path, tiny_spec(launcher__max_restarts=9), FAKE_FAULT="raise:0:7:99")
    assert code == ExitCode.NO_PROGRESS
    assert "ValueError: told to fail" in err
    assert len(events_of(run_of(tmp_path), "restart")) == 2


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_hang_names_who_is_behind(tmp_path, kind):
    spec = tiny_spec(launcher__timeout=1.5, launcher__max_restarts=1)
    code, out, err = run_fake(tmp_path, spec, FAKE_FAULT=f"{kind}:1:7")
    assert (code, err) == (0, "")
    assert "rank 1 (dp1) failed at step 7: hang: no progress on any rank for 2 s" in out
    assert steps_of(run_of(tmp_path)) == list(range(1, 21))


def test_a_hang_without_restarts_left(tmp_path):
    spec = tiny_spec(launcher__timeout=1.5, launcher__max_restarts=0)
    code, _, err = run_fake(tmp_path, spec, FAKE_FAULT="stop:0:7:9")
    assert code == ExitCode.HANG
    assert "rank 0 (dp0) on " in err
    assert running(worker_pids(run_of(tmp_path))) == []


@pytest.mark.parametrize(
    ("number", "expected", "event"),
    [
        (signal.SIGTERM, 75, "SIGTERM"),
        (signal.SIGINT, 130, "SIGINT"),
        (signal.SIGUSR1, 75, "SIGUSR1"),
        (signal.SIGHUP, 75, "SIGHUP"),
    ],
)
def test_a_stop_signal_is_passed_on(tmp_path, number, expected, event):
    directory = run_of(tmp_path)
    with launched(tmp_path, tiny_spec(train__steps=10000)) as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        process.send_signal(number)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert process.returncode == expected
    assert time.monotonic() - began < 5
    outcome = read_outcome(directory.outcome)
    assert outcome.exit_code == expected
    assert directory.checkpoint(outcome.step).is_dir()
    assert events_of(directory, "stop_requested")[0]["signal"] == event
    assert "the same command continues" in err


def test_a_second_signal_ends_at_once(tmp_path):
    directory = run_of(tmp_path)
    spec = tiny_spec(train__steps=10000, launcher__grace=60.0)
    with launched(tmp_path, spec, FAKE_IGNORE_STOP="1") as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: events_of(directory, "stop_requested"))
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        process.communicate(timeout=30)
    assert time.monotonic() - began < 3
    assert process.returncode == 130
    assert running(worker_pids(directory)) == []


def test_workers_that_do_not_stop_are_ended_after_the_grace_time(tmp_path):
    directory = run_of(tmp_path)
    spec = tiny_spec(train__steps=10000, launcher__grace=1.0)
    with launched(tmp_path, spec, FAKE_IGNORE_STOP="1") as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 75
    assert running(worker_pids(directory)) == []


def test_a_stop_before_the_first_worker(tmp_path):
    with launched(tmp_path, tiny_spec()) as process:
        wait_until(lambda: events_of(run_of(tmp_path), "launch"))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 75


def test_an_abort_after_the_outcome_is_no_failure(tmp_path):
    code, _, err = run_fake(tmp_path, tiny_spec(), FAKE_ABORT_AT_END="1")
    assert (code, err) == (0, "")
    assert events_of(run_of(tmp_path), "restart") == []
    assert len(events_of(run_of(tmp_path), "phase")) == 1  # the agent had no time to start the workers again


@pytest.mark.parametrize("whom", ["launcher", "agent"])
def test_nothing_outlives_a_killed_launcher_or_agent(tmp_path, whom):
    directory = run_of(tmp_path)
    with launched(tmp_path, tiny_spec(train__steps=10000)) as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        tree = [found.pid for found in descendants(process.pid)]
        assert len(tree) == 3
        agent = tree[0]
        if whom == "launcher":
            process.kill()
        else:
            os.kill(agent, signal.SIGKILL)
        wait_until(lambda: not running(tree), seconds=5)
        process.communicate(timeout=10)
    if whom == "agent":
        assert process.returncode == ExitCode.CRASH
    # Nothing needs cleaning up before the next launch.
    code, _, err = run_fake(tmp_path, tiny_spec())
    assert (code, err) == (0, "")


def test_workers_that_outlive_their_agent_are_found_and_ended(tmp_path):
    directory = run_of(tmp_path)
    with launched(tmp_path, tiny_spec(train__steps=10000), FAKE_ORPHAN="1") as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        agent, *workers = [found.pid for found in descendants(process.pid)]
        assert len(workers) == 2
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: not running(workers), seconds=5)
        _, err = process.communicate(timeout=10)
    assert process.returncode == ExitCode.CRASH
    assert len(err.splitlines()) <= 15
