"""The launcher on a fake worker under the real elastic agent: crashes, hangs, stops, and nothing left running."""

from __future__ import annotations

import os
import signal
import time

import pytest
from launching import (
    events_of,
    launched,
    read_only,
    run_fake,
    run_of,
    running,
    steps_of,
    tiny_spec,
    wait_until,
    worker_pids,
)

from megalaunch.process import descendants
from megalaunch.rundir.outcome import ExitCode, read_outcome
from megalaunch.rundir.progress import read_progress


@pytest.fixture
def quick_replies(monkeypatch):
    """A launcher, which is a fork of this process, waits 2 s in place of 10 for the stack of a rank that is stopped."""
    monkeypatch.setattr("megalaunch.launch.hang.collective_traces.REPLY_SECONDS", 2.0)


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
        pytest.param("raise:0:7", "rank 0 (dp0) failed at step 7: ValueError: told to fail", marks=pytest.mark.slow),
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
    assert lines[0] == "megalaunch: a worker crashed; restarts used: 1 of 1 (launcher.max_restarts) (exit code 5)"
    assert "rank 1 (dp1) on " in lines[1]
    assert "step 7, step (attempt 2)" in lines[2]
    assert "SIGKILL: killed from outside, possibly by the out-of-memory killer" in lines[3]
    assert str(run_of(tmp_path).rank_log(1)) in err
    outcome = read_outcome(run_of(tmp_path).outcome)
    assert (outcome.exit_code, outcome.step, outcome.details["rank"]) == (5, 6, 1)


def test_workers_that_cannot_even_start_are_not_started_again(tmp_path):
    code, _, err = run_fake(tmp_path, tiny_spec(), PYTHONPATH=str(tmp_path))
    assert code == ExitCode.CRASH
    assert err.startswith("megalaunch: the elastic agent failed (exit code 5)")
    assert "No module named fake_worker" in err
    assert events_of(run_of(tmp_path), "restart") == []


def test_the_same_failure_three_times_is_no_progress(tmp_path):
    code, _, err = run_fake(tmp_path, tiny_spec(launcher__max_restarts=9), FAKE_FAULT="raise:0:7:99")
    assert code == ExitCode.NO_PROGRESS
    assert "ValueError: told to fail" in err
    assert [event["pause_seconds"] for event in events_of(run_of(tmp_path), "restart")] == [0.0, 0.1]


def test_workers_that_others_have_replaced_are_not_restarted(tmp_path):
    code, _, err = run_fake(tmp_path, tiny_spec(), FAKE_FAULT="superseded:0:7:99")
    assert code == ExitCode.PREEMPTED
    assert f"later workers have taken over the run (see {run_of(tmp_path).rank_log(0)})" in " ".join(err.split())
    assert events_of(run_of(tmp_path), "restart") == []
    assert not run_of(tmp_path).outcome.exists()  # it would be that of the others


def test_a_new_checkpoint_refills_the_restarts(tmp_path):
    """Two unrelated crashes with one restart allowed: between them the run got further."""
    fault = {"FAKE_FAULT": "kill:1:7,kill:1:12:2", "FAKE_CHECKPOINT_INTERVAL": "5"}
    code, _, err = run_fake(tmp_path, tiny_spec(launcher__max_restarts=1), **fault)
    assert (code, err) == (0, "")
    restarts = events_of(run_of(tmp_path), "restart")
    assert [(event["attempt"], event["pause_seconds"]) for event in restarts] == [(1, 0.0), (2, 0.0)]
    assert steps_of(run_of(tmp_path)) == list(range(1, 21))


def test_faults_of_the_agent_are_named_and_it_is_started_again(tmp_path):
    directory = run_of(tmp_path)
    spec = tiny_spec(launcher__hang_timeout=1.5, train__steps=60)
    faults = {"FAKE_CHECKPOINT_INTERVAL": "1", "FAKE_STEP_SECONDS": "0.05"}
    with launched(tmp_path, spec, **faults) as process:
        wait_until(lambda: 5 in steps_of(directory))
        agent, *_ = [found.pid for found in descendants(process.pid)]
        os.kill(agent, signal.SIGSTOP)  # it starts nothing again, for longer than launcher.hang_timeout
        os.kill(read_progress(directory.progress(1)).pid, signal.SIGKILL)
        (crash,) = wait_until(lambda: events_of(directory, "restart"))
        assert "rank 1 (dp1) failed at step " in crash["reason"]
        assert "SIGKILL: killed from outside" in crash["reason"]
        known = max(steps_of(directory))
        wait_until(lambda: max(steps_of(directory)) > known, 40)
        agent, *_ = [found.pid for found in descendants(process.pid)]
        os.kill(agent, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    reasons = [event["reason"] for event in events_of(directory, "restart")]
    assert len(reasons) == 2
    assert reasons[1].startswith("the agent failed at step ")
    assert reasons[1].endswith(
        "SIGKILL: killed from outside, possibly by the out-of-memory killer; its workers were ended with it"
    )
    assert "hang" not in out
    assert steps_of(directory) == list(range(1, 61))


@pytest.mark.parametrize("kind", ["stop", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_hang_names_who_is_behind(tmp_path, quick_replies, kind):
    spec = tiny_spec(launcher__hang_timeout=1.5, launcher__max_restarts=1)
    code, out, err = run_fake(tmp_path, spec, FAKE_FAULT=f"{kind}:1:7")
    assert (code, err) == (0, "")
    assert "rank 1 (dp1) failed at step 7: hang: no progress on any rank for 2 s" in out
    assert steps_of(run_of(tmp_path)) == list(range(1, 21))


@pytest.mark.slow  # a hang above, and restarts used up by crashes
def test_a_hang_without_restarts_left(tmp_path, quick_replies):
    spec = tiny_spec(launcher__hang_timeout=1.5, launcher__max_restarts=0)
    code, _, err = run_fake(tmp_path, spec, FAKE_FAULT="stop:0:7:9")
    assert code == ExitCode.HANG
    assert "rank 0 (dp0) on " in err
    assert running(worker_pids(run_of(tmp_path))) == []


@pytest.mark.parametrize(
    ("number", "expected", "event"),
    [
        (signal.SIGTERM, 75, "SIGTERM"),
        (signal.SIGINT, 130, "SIGINT"),
        pytest.param(signal.SIGUSR1, 75, "SIGUSR1", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 75, "SIGHUP", marks=pytest.mark.slow),
    ],
)
def test_a_stop_signal_is_passed_on(tmp_path, number, expected, event):
    directory = run_of(tmp_path)
    with launched(tmp_path, tiny_spec(train__steps=10000, launcher__stop_grace_period=60.0)) as process:
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
    assert "run the same command to resume" in err


def test_a_second_signal_ends_at_once(tmp_path):
    directory = run_of(tmp_path)
    spec = tiny_spec(train__steps=10000, launcher__stop_grace_period=60.0)
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
    spec = tiny_spec(train__steps=10000, launcher__stop_grace_period=1.0)
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
    with launched(tmp_path, tiny_spec(train__steps=10000, launcher__max_restarts=0)) as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        tree = [found.pid for found in descendants(process.pid)]
        assert len(tree) == 3
        agent = tree[0]
        if whom == "launcher":
            process.kill()
        else:
            os.kill(agent, signal.SIGKILL)
        wait_until(lambda: not running(tree), seconds=5)
        _, err = process.communicate(timeout=10)
    if whom == "agent":
        assert process.returncode == ExitCode.CRASH
        assert err.startswith("megalaunch: the elastic agent failed (exit code 5)")
        assert "SIGKILL: killed from outside" in err
    # Nothing needs cleaning up before the next launch.
    code, _, err = run_fake(tmp_path, tiny_spec())
    assert (code, err) == (0, "")


def test_workers_that_outlive_their_agent_are_found_and_ended(tmp_path):
    directory = run_of(tmp_path)
    with launched(tmp_path, tiny_spec(train__steps=10000, launcher__max_restarts=0), FAKE_ORPHAN="1") as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        agent, *workers = [found.pid for found in descendants(process.pid)]
        assert len(workers) == 2
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: not running(workers), seconds=5)
        _, err = process.communicate(timeout=10)
    assert process.returncode == ExitCode.CRASH
    assert len(err.splitlines()) <= 15


def test_a_run_directory_that_becomes_read_only(tmp_path):
    directory = run_of(tmp_path)
    with launched(tmp_path, tiny_spec(train__steps=10000, run__storage_timeout=2.0)) as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        with read_only(directory.root):
            out, err = process.communicate(timeout=60)
        assert process.returncode == ExitCode.CHECKPOINT
        assert "Traceback" not in err
        assert "a checkpoint could not be saved or loaded, or the run directory is not writable (exit code 4)" in err
        reason = " ".join(err.split())
        assert f"reason {directory.root} cannot be written: " in reason
        assert "make it writable, then run the same command to resume" in reason
        assert "restart" not in out


def test_ranks_that_are_silent_while_the_storage_fails_do_not_hang(tmp_path):
    directory = run_of(tmp_path)
    limits = {"launcher__hang_timeout": 1.5, "launcher__step_timeout": 1.5}
    with launched(tmp_path, tiny_spec(train__steps=100, **limits), FAKE_WAIT_FOR_STORAGE="1") as process:
        wait_until(lambda: len(steps_of(directory)) > 10)
        with read_only(directory.root):
            time.sleep(5)  # three times the limit
            assert process.poll() is None
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert events_of(directory, "restart") == events_of(directory, "worker_failed") == []
    assert steps_of(directory) == list(range(1, 101))


def test_a_worker_that_dies_of_failing_storage_starts_again_when_it_is_back(tmp_path):
    directory = run_of(tmp_path)
    with launched(tmp_path, tiny_spec(train__steps=100)) as process:
        wait_until(lambda: len(steps_of(directory)) > 3)
        with read_only(directory.root):
            time.sleep(3)
            assert process.poll() is None
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert [event["attempt"] for event in events_of(directory, "restart")] == [1]
    assert out.count("the run waits 10 min 00 s for it (run.storage_timeout)") == 1
    assert out.count(f"{directory.root} can be written again after") == 1
