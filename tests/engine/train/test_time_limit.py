"""A launch ends on all ranks once `train.exit_duration_in_mins` have passed on any, and the next one continues."""

from __future__ import annotations

import signal
import time

from looped_run import Rank, events, metrics, run_loop, ten_steps

from megalaunch.engine.worker_setup import StopSignal
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import with_values

LIMIT = "train.exit_duration_in_mins"


def test_a_launch_ends_after_its_time_and_the_next_one_continues(tmp_path):
    spec, whole, parts = ten_steps(tmp_path), tmp_path / "whole", tmp_path / "parts"
    run_loop(spec, whole)
    limited = with_values(spec, {LIMIT: 60.0})
    for last in (1, 2):  # each launch does at least one step
        end = run_loop(limited, parts, _begin_an_hour_ago)
        assert (end.exit_code, end.step) == (ExitCode.DONE, last)
        assert end.reason == f"stopped after step {last} of 10, train.exit_duration_in_mins=60 after the start"
    last_step = with_values(limited, {"train.exit_at_step": 3})  # which is validated, although the time is over
    assert run_loop(last_step, parts, _begin_an_hour_ago).reason == "stopped after step 3 of 10 as asked"
    assert [line["step"] for line in metrics(parts) if "validation_loss" in line] == [3]
    assert run_loop(spec, parts).reason == "finished all 10 steps"
    assert metrics(parts) == metrics(whole)
    assert not events(parts, "stop_requested")


def _begin_an_hour_ago(rank: Rank) -> None:
    """On one rank alone: the ranks' clocks differ."""
    if rank.rank == 1:
        rank.stop._started -= 3600


def test_a_signal_counts_before_the_time():
    stop = StopSignal()
    assert stop.request(None) is None
    assert stop.request(1.0) is None
    stop._started = time.monotonic() - 60
    assert stop.request(1.0) == signal.SIGALRM
    stop.signal = signal.SIGTERM
    assert stop.request(1.0) == signal.SIGTERM
