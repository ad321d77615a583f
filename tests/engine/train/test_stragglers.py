"""Ranks that compute slower than the others, or wait for a CPU or for tokens, are named; one busy moment is none."""

from __future__ import annotations

import time

import pytest
import torch
from looped_run import Rank, events, run_loop, ten_steps

from megalaunch.engine.train import stragglers
from megalaunch.engine.train.stragglers import Check, time_matmuls
from megalaunch.schema import with_values

EVERY_STEP = {"train.straggler_interval": 1, "train.straggler_threshold": 0.5}
THREE_STEPS = {"train.steps": 3}  # so many checks name a rank
DP3 = {
    "parallel.dp": 3,
    "cluster.devices_per_node": 3,
    "batch.global_batch_size": 6,
}


def times_of(waited: list[float]) -> dict[str, list[float]]:
    """Times of ranks that wait for data in these shares of a step."""
    return {"data": [2.0 * share for share in waited], "step": [2.0] * len(waited)}


@pytest.mark.parametrize(
    ("seconds", "waited", "compute", "data"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [], []),
        ([1.0, 1.32, 1.0, 1.0], [0.24, 0.0, 0.0, 0.0], [], []),  # above the threshold
        ([1.0, 1.34, 1.0, 1.0], [0.0, 0.0, 0.0, 0.26], [1], [3]),
        ([0.5, 1.0, 1.0, 1.0], [0.6, 0.6, 0.6, 0.6], [], []),  # one fast rank; all wait alike
    ],
)
def test_speeds_are_compared_with_the_median(seconds, waited, compute, data):
    check = Check(seconds, [0.0] * 4, times_of(waited))
    assert check.slow_ranks(0.75) == {"compute": compute, "cpu": [], "data": data}


@pytest.mark.parametrize(
    ("waited", "slow"),
    [
        ([0.05, 0.35], []),  # a sixth of the checks with a fifth of a CPU for rank 1 are so; the others like the next
        ([0.05, 0.55], [1]),
        ([0.82, 0.35], []),  # two ranks of a machine with thirty processes on two cores
        ([0.25, 0.74], []),
        ([0.0, 0.3, 0.0, 0.0], [1]),
        ([0.3, 0.0, 0.3, 0.3], []),
    ],
)
def test_a_wait_for_a_cpu_counts_beyond_twice_that_of_the_others(waited, slow):
    same = [1.0] * len(waited)
    assert Check(same, waited, times_of(same)).slow_ranks(0.75)["cpu"] == slow


def test_the_probe_takes_longer_for_more_products():
    few, many = (time_matmuls(torch.device("cpu"), torch.float32, products) for products in (1, 40))
    assert 0 < few < many


def slow_on(rank: Rank, which: int, slow_calls: set[int]) -> None:
    """Let the probe of a rank take three times as long in some of its calls; the first tells how many products."""
    calls = iter(range(1000))

    def probe(*_: object, **__: object) -> float:
        return 3.0 if next(calls) in slow_calls and rank.rank == which else 1.0

    stragglers.time_matmuls = probe
    stragglers.CpuWait.share = lambda _: 0.0  # whatever else runs on this machine


def test_a_slow_device_is_named_after_three_checks_and_again_after_a_recovery(tmp_path):
    spec = with_values(ten_steps(tmp_path), EVERY_STEP | DP3)
    assert int(run_loop(spec, tmp_path / "run", lambda rank: slow_on(rank, 1, {1, 2, 3, 4, 6, 7, 8})).exit_code) == 0
    named = events(tmp_path / "run", "straggler")
    assert [(event["step"], event["cause"], event["ranks"], event["speed"]) for event in named] == [
        (3, "compute", [1], 0.333),
        (8, "compute", [1], 0.333),
    ]
    assert named[0]["nodes"] == [0]
    (place,) = named[0]["places"]
    assert place.startswith("rank 1 (dp1) on ")


@pytest.mark.slow
def test_ranks_that_wait_for_a_cpu_or_for_tokens_are_named(tmp_path):
    def slow(rank: Rank) -> None:
        stragglers.time_matmuls = lambda *_, **__: 1.0
        stragglers.CpuWait.share = lambda _: 0.8 if rank.rank == 1 else 0.1
        if rank.rank == 2:
            rank.during("training", lambda _: time.sleep(0.5))

    spec = with_values(ten_steps(tmp_path), EVERY_STEP | DP3 | {"train.straggler_threshold": 0.9})
    assert int(run_loop(spec, tmp_path / "run", slow).exit_code) == 0
    named = {event["cause"]: event for event in events(tmp_path / "run", "straggler")}
    assert {cause: event["ranks"] for cause, event in named.items()} == {"cpu": [1], "data": [2]}
    assert named["cpu"]["speed"] == 0.2
    assert named["data"]["speed"] < 0.9


@pytest.mark.slow
def test_a_host_of_slow_ranks_is_one_place(tmp_path):
    def slow_host(rank: Rank) -> None:
        stragglers.time_matmuls = lambda *_, **__: 3.0 if rank.rank else 1.0
        stragglers.CpuWait.share = lambda _: 0.0
        stragglers.median = min  # or two of three slow ranks would be the usual ones
        stragglers.socket.gethostname = lambda: "n1" if rank.rank else "n0"

    spec = with_values(ten_steps(tmp_path), EVERY_STEP | DP3 | THREE_STEPS)
    run_loop(spec, tmp_path / "run", slow_host)
    (event,) = events(tmp_path / "run", "straggler")
    assert (event["ranks"], event["places"]) == ([1, 2], ["all 2 ranks on n1"])


def test_nothing_is_checked_on_cpus_unless_it_is_asked_for(tmp_path):
    def forbidden(rank: Rank) -> None:
        stragglers.time_matmuls = lambda *_, **__: pytest.fail("a probe was timed")

    spec = with_values(ten_steps(tmp_path), THREE_STEPS)
    assert int(run_loop(spec, tmp_path / "run", forbidden).exit_code) == 0
