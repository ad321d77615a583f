"""The times of each rank in the phases of a step: where a slow rank is slow, by a clock that only the test moves."""

from __future__ import annotations

import time

import pytest
from looped_run import Rank, events, metrics, run_loop, ten_steps

from megalaunch.engine.train import stragglers
from megalaunch.engine.train.dataloader import PrefetchingDataLoader
from megalaunch.engine.train.phase_clock import PhaseClock
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.schema import with_values

CHECKED = {
    "train.steps": 7,
    "train.straggler_interval": 2,
    "parallel.dp": 3,
    "cluster.devices_per_node": 3,
    "batch.global_batch_size": 6,
}
DATA, FORWARD_BACKWARD, OPTIMIZER, AFTER_STEP = 0.25, 0.5, 1.0, 8.0  # seconds that each takes on the slow rank
COUNT_TOKENS = 2.0  # on all ranks


def test_a_phase_is_divided_by_the_times_that_it_has_ended():
    clock = PhaseClock()
    clock.add("step", 3.0)
    clock.add("step", 5.0)
    with pytest.raises(KeyError), clock.phase_scope("optimizer"):
        raise KeyError  # a bad step ends before its update: it has no whole time either
    assert clock.take() == {"data": 0.0, "forward_backward": 0.0, "optimizer": 0.0, "step": 4.0}
    assert clock.take()["step"] == 0.0


def slow_by_a_played_clock(rank: Rank) -> None:
    """Let rank 1 take long in each phase, and its probe too; on the others the clock stands still in all phases."""
    now = [100.0]
    time.perf_counter = lambda: now[0]

    def slow(work, seconds):
        def take(*arguments, **named):
            now[0] += seconds
            return work(*arguments, **named)

        return take

    TrainStep._count_tokens = slow(TrainStep._count_tokens, COUNT_TOKENS)
    stragglers.time_matmuls = lambda *_, **__: 3.0 if rank.rank == 1 else 1.0
    stragglers.CpuWait.share = lambda _: 0.0
    if rank.rank == 1:
        passes, optimizer = type(rank.trainee.forward_backward), type(rank.trainee.optimizer)
        PrefetchingDataLoader._result = slow(PrefetchingDataLoader._result, DATA)
        passes.train = slow(passes.train, FORWARD_BACKWARD)
        optimizer.step = slow(optimizer.step, OPTIMIZER)
        stragglers.StragglerDetector.update = slow(stragglers.StragglerDetector.update, AFTER_STEP)


def test_the_phases_of_a_slow_rank_are_told_with_the_median_of_all(tmp_path):
    spec = with_values(ten_steps(tmp_path), CHECKED)
    run_loop(spec, tmp_path / "run", slow_by_a_played_clock)
    found = {event["cause"]: event for event in events(tmp_path / "run", "straggler")}
    times = {"data": DATA, "forward_backward": FORWARD_BACKWARD, "optimizer": OPTIMIZER}
    usual = dict.fromkeys(times, 0.0)
    times["step"], usual["step"] = sum(times.values()) + COUNT_TOKENS, COUNT_TOKENS
    assert found["compute"]["times"] == {phase: [seconds] for phase, seconds in times.items()}
    assert found["compute"]["median_times"] == usual
    assert found["compute"]["step"] == 6


def test_losses_do_not_depend_on_the_clock(tmp_path):
    checked = with_values(ten_steps(tmp_path), {**CHECKED, "train.straggler_threshold": 0.0})
    run_loop(checked, tmp_path / "checked")
    run_loop(with_values(checked, {"train.straggler_interval": 0}), tmp_path / "unchecked")
    assert metrics(tmp_path / "checked") == metrics(tmp_path / "unchecked")
