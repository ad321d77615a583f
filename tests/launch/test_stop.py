"""Stop signals counted, processes named by more than a pid, and a line while something else is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from launching import wait_until

import megalaunch.launch.heartbeat
from megalaunch.launch.heartbeat import Heartbeat
from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
from megalaunch.process import Process, find_process, is_alive, is_stopped, kill_all, return_code, send_signal
from megalaunch.rundir.outcome import ExitCode


def test_before_the_launch_a_signal_leaves_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopBeforeLaunch) as stopped, StopSignals():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.exit_code == ExitCode.PREEMPTED
    assert signal.getsignal(signal.SIGTERM) is before


def test_while_watching_signals_are_counted_and_the_first_decides():
    with StopSignals() as stop:
        stop.watching = True
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.count, stop.exit_code, stop.signal_for_workers) == (1, ExitCode.INTERRUPTED, signal.SIGINT)
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.count, stop.exit_code) == (2, ExitCode.INTERRUPTED)


def test_one_request_that_is_delivered_twice_counts_once():
    with StopSignals() as stop:
        stop.watching = True
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.count == 1
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.count == 2


def test_an_early_warning_asks_the_workers_to_save():
    with StopSignals() as stop:
        stop.watching = True
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.exit_code, stop.signal_for_workers) == (ExitCode.PREEMPTED, signal.SIGTERM)


def test_a_signal_that_our_parent_had_blocked_is_heard():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        with StopSignals() as stop:
            stop.watching = True
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.first == signal.SIGUSR1
        assert {signal.SIGUSR1, signal.SIGTERM} <= signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_from_start_to_end():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = find_process(child.pid)
    assert process is not None
    assert is_alive(process)
    assert not is_alive(Process(child.pid, process.started + 1))  # another process with its pid
    assert not send_signal(Process(child.pid, process.started + 1), signal.SIGKILL)
    assert send_signal(process, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process))
    assert return_code(process) is None
    assert kill_all([process], 5) == []
    assert not is_alive(process)
    assert return_code(process) == -9  # nobody has waited for it yet
    child.wait()
    assert find_process(child.pid) is None
    assert return_code(process) is None


def test_patience_repeats_what_goes_on(monkeypatch):
    monkeypatch.setattr(megalaunch.launch.heartbeat, "INTERVAL", 0.3)
    lines: list[str] = []
    with Heartbeat(lines.append) as patience:
        patience.say("training a tokenizer")
        wait_until(lambda: len(lines) > 1)
    assert lines[0] == "training a tokenizer"
    assert lines[1].startswith("  still running, ")
    assert lines[1].endswith(": training a tokenizer")
