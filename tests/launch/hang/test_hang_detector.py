"""How long ranks may stand still: by what they do, by how long their steps are, and by whether anybody watched."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import tiny_spec

from megalaunch.launch.hang import rank_monitor as ranks_module
from megalaunch.launch.hang.hang_detector import HangDetector
from megalaunch.launch.hang.rank_monitor import Rank, RankMonitor
from megalaunch.launch.supervise import RestartBudget
from megalaunch.process import Process
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import Progress


def ranks_at(step: int, time: float = 0.0, phase: str = "step", other: str = "") -> RankMonitor:
    """Two ranks of two; the second may be in another phase."""
    ranks = RankMonitor(RunDirectory(Path("nowhere")), 2, 0)
    for number in (0, 1):
        progress = Progress(number, 100 + number, 0, "", (number and other) or phase, step, step, time)
        ranks.known[number] = Rank(progress, Process(100 + number, 5))
    return ranks


def clock_after(seconds_per_step: float, steps: int = 10, **values) -> HangDetector:
    """A clock that has seen `steps` steps."""
    clock = HangDetector(tiny_spec(**{"launcher__hang_timeout": 600.0, **values}), 0.0)
    for step in range(steps):
        clock.poll(step * 0.2, ranks_at(step, 1e9 + step * seconds_per_step), moved=True)
    return clock


@pytest.mark.parametrize(("seconds_per_step", "limit"), [(0.05, 12.0), (1.1, 12.0), (4.0, 40.0), (90.0, 600.0)])
def test_a_step_has_ten_times_its_median_but_12_seconds(seconds_per_step, limit):
    clock = clock_after(seconds_per_step)
    clock.poll(100.0, ranks_at(20, 1e9 + 5000.0), moved=True)  # one step that took long changes nothing
    assert clock.limit(ranks_at(20)) == pytest.approx(limit)


def test_steps_that_come_faster_than_looks_are_counted():
    clock = HangDetector(tiny_spec(launcher__hang_timeout=600.0), 0.0)
    for look in range(10):
        clock.poll(look * 0.2, ranks_at(look * 100, 1e9 + look * 200.0), moved=True)
    assert clock.limit(ranks_at(1000)) == pytest.approx(20.0)


@pytest.mark.parametrize(("step", "limit"), [(4, 600.0), (5, 12.0), (19, 12.0)])
def test_five_steps_are_enough_however_few_looks_have_seen_them(step, limit):
    """A small model may hang in the first second of its steps: after some twenty of them, and four or five looks."""
    clock = HangDetector(tiny_spec(launcher__hang_timeout=600.0), 0.0)
    for look, seen in enumerate((0, step)):
        clock.poll(look * 0.2, ranks_at(seen, 1e9 + seen * 0.04), moved=True)
    assert clock.limit(ranks_at(step)) == limit


@pytest.mark.parametrize("phase", ["saving", "validating", "waiting for tokens", "training"])
def test_what_is_no_step_has_the_whole_limit(phase):
    clock = clock_after(0.05)
    assert clock.limit(ranks_at(20, phase=phase)) == 600
    assert clock.limit(ranks_at(20, other=phase)) == 600


def test_before_the_length_of_steps_is_known():
    assert clock_after(0.05, steps=3).limit(ranks_at(3)) == 600


def test_compiled_layers_may_be_compiled_anew():
    assert clock_after(0.05, train__compile=True).limit(ranks_at(20)) == 600
    assert clock_after(0.05, train__compile=True, launcher__step_timeout=40.0).limit(ranks_at(20)) == 40


def test_settings_go_first():
    assert clock_after(0.05, launcher__hang_timeout=7.0).limit(ranks_at(20)) == 7
    assert clock_after(0.05, launcher__step_timeout=60.0).limit(ranks_at(20)) == 60
    assert clock_after(0.05, launcher__step_timeout=700.0).limit(ranks_at(20)) == 600


def test_a_start_has_a_longer_limit_of_its_own():
    clock = clock_after(0.05, launcher__hang_timeout=20.0)
    assert clock.limit(ranks_at(0, phase="loading")) == 1800
    assert clock.limit(ranks_at(0, phase="training", other="loading torch")) == 1800
    lonely = ranks_at(0)
    del lonely.known[1]
    assert clock.limit(lonely) == 1800  # its peer has not reported yet
    assert clock_after(0.05, launcher__start_timeout=30.0).limit(ranks_at(0, phase="joining")) == 600


def test_a_stopped_process_has_the_limit_of_a_step_whatever_it_did(monkeypatch):
    """Also before the length of steps is known, while ranks start, and with a compiler."""
    clock, slow = clock_after(0.05), clock_after(4.0)
    monkeypatch.setattr(ranks_module, "is_stopped", lambda process: process.pid == 101)
    monkeypatch.setattr(ranks_module, "is_traced", lambda process: False)
    assert clock.limit(ranks_at(20, phase="validating")) == 12
    assert slow.limit(ranks_at(20, phase="validating")) == pytest.approx(40)
    assert clock_after(0.05, steps=0).limit(ranks_at(1)) == 12
    assert clock_after(0.05, steps=0).limit(ranks_at(0, phase="joining")) == 12
    assert clock_after(4.0, train__compile=True).limit(ranks_at(20)) == 12
    assert clock_after(4.0, launcher__step_timeout=5.0).limit(ranks_at(0, phase="joining")) == 5
    monkeypatch.setattr(ranks_module, "is_traced", lambda process: process.pid == 101)
    assert clock.limit(ranks_at(20)) == 600  # somebody debugs it
    assert clock.limit(ranks_at(0, phase="joining")) == 1800


def test_time_in_which_the_launcher_did_not_run_is_no_silence():
    clock = clock_after(0.05)
    still = ranks_at(20)
    clock.poll(2.0, still, moved=True)
    clock.poll(3600.0, still, moved=False)  # the whole job was suspended
    assert not clock.is_hung(still)
    for second in range(1, 11):
        clock.poll(3600.0 + second, still, moved=False)
    assert not clock.is_hung(still)
    clock.poll(3611.0, still, moved=False)
    assert clock.silent == pytest.approx(13.0)
    assert clock.is_hung(still)
    clock.poll(3612.0, still, moved=True)
    assert not clock.is_hung(still)


def test_restarts_in_a_row_and_their_pauses():
    budget = RestartBudget(8, 10.0)
    assert [budget.take() for _ in range(9)] == [0, 10, 20, 40, 80, 160, 300, 300, None]
    budget.checkpoint_saved(5)
    assert budget.take() == 0
    budget.checkpoint_saved(5)  # the same steps again: that is no progress
    assert budget.take() == 10
    budget.checkpoint_saved(10)
    assert budget.take() == 0


def test_a_run_that_goes_on_from_a_checkpoint_has_to_get_further():
    budget = RestartBudget(1, 0.0, saved_step=40)
    assert budget.take() == 0
    budget.checkpoint_saved(40)
    assert budget.take() is None
    assert RestartBudget(0, 1.0).take() is None
