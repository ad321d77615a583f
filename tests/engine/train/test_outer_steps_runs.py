"""Runs with outer steps: exact resumes within a round and after one, other replicas refused, replicas compared."""

from __future__ import annotations

import signal

import pytest
import torch
from forked_ranks import RanksFailed
from looped_run import Rank, events, metrics, run_loop, ten_steps
from slow_cases import slow_but

from megalaunch.engine.checkpoint.load_tensors import read_tensors
from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values

EVERY_3 = {"parallel.outer_steps": 3, "parallel.data_sharding": "no_shard", "checkpoint.keep_last": 0}
FOUR_RANKS = {"parallel.dp": 4, "parallel.dp_replicate": 2, "parallel.data_sharding": "optim_grads_params",
              "cluster.devices_per_node": 4, "batch.micro_batch_size": 1}  # fmt: skip
HASHES = "train.check_weight_hash_across_dp_replicas_interval"
TENSOR = "layers.1.mlp.down_proj.weight"


def tensors_at(root, step):
    return read_tensors(RunDirectory(root).checkpoint(step))


def stop_in_step(number):
    """Send every rank a SIGTERM before a step."""

    def spoil(rank: Rank) -> None:
        real = TrainStep.run

        def run(self, step, batch, stop_request, problem=None):
            return real(self, step, batch, (lambda: signal.SIGTERM) if step == number else stop_request, problem)

        TrainStep.run = run

    return spoil


@pytest.mark.parametrize("layout", slow_but([{}, FOUR_RANKS], {}, every=()))
def test_a_stopped_run_goes_on_exactly_within_a_round_and_after_one(tmp_path, layout):
    spec = with_values(ten_steps(tmp_path), EVERY_3 | layout)
    assert int(run_loop(spec, tmp_path / "whole").exit_code) == 0
    for step in (5, 9):
        assert int(run_loop(spec, tmp_path / "parts", stop_in_step(step)).exit_code) == 75
        assert (events(tmp_path / "parts", "checkpoint")[-1]["step"]) == step
    assert int(run_loop(spec, tmp_path / "parts").exit_code) == 0
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    found, expected = tensors_at(tmp_path / "parts", 10), tensors_at(tmp_path / "whole", 10)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    within, after = tensors_at(tmp_path / "parts", 5), tensors_at(tmp_path / "parts", 9)
    own = [f"replica{replica}.model.{TENSOR}" for replica in (0, 1)]
    assert not torch.equal(within[own[0]], within[own[1]])
    assert not torch.equal(within[own[0]], within[f"model.{TENSOR}"])
    assert not any(".model." in name for name in after)  # the weights are those of all replicas
    moments = [f"replica{replica}.optimizer.exp_avg.{TENSOR}" for replica in (0, 1)]
    assert not torch.equal(after[moments[0]], after[moments[1]])
    assert f"outer.momentum.{TENSOR}" in after


@pytest.mark.slow
def test_the_layout_within_a_replica_may_change(tmp_path):
    """Both layouts give a replica the same samples."""
    spec = with_values(ten_steps(tmp_path), EVERY_3)
    assert int(run_loop(spec, tmp_path / "whole").exit_code) == 0
    assert int(run_loop(spec, tmp_path / "parts", stop_in_step(5)).exit_code) == 75
    assert int(run_loop(with_values(spec, FOUR_RANKS), tmp_path / "parts").exit_code) == 0
    for found, expected in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_other_replicas_than_those_of_the_checkpoint_are_refused(tmp_path):
    spec = with_values(ten_steps(tmp_path), EVERY_3 | {"train.exit_at_step": 3})
    assert int(run_loop(spec, tmp_path / "run").exit_code) == 0
    message = (
        r"holds optimizer states of 2 replicas that train apart \(parallel.outer_steps\), the run has no replicas that "
        r"train apart: continue with the replicas that saved it, or begin a new run with its weights \(checkpoint.load_"
    )
    with pytest.raises(RanksFailed, match=message):
        run_loop(with_values(spec, {"parallel.outer_steps": 0}), tmp_path / "run")


@pytest.mark.slow
def test_the_outer_weights_of_replicas_are_compared(tmp_path):

    def flip(rank: Rank) -> None:
        real = TrainStep.run

        def run(self, number, *rest):
            if number == 6 and rank.rank == 1:
                momentum = to_local_no_grad(rank.trainee.optimizer.outer.states()[f"outer.momentum.{TENSOR}"])
                momentum.view(-1).view(torch.uint8)[0] ^= 1
            return real(self, number, *rest)

        TrainStep.run = run

    spec = with_values(ten_steps(tmp_path), EVERY_3 | {HASHES: 4})
    assert int(run_loop(spec, tmp_path / "whole").exit_code) == 0
    ending = run_loop(spec, tmp_path / "run", flip)
    assert (int(ending.exit_code), ending.step) == (7, 8)
    assert f"their replicas differ, in outer.momentum.{TENSOR}" in ending.reason.replace("model.", "")


def test_a_bad_step_of_one_replica_is_left_out_by_all(tmp_path):
    """The round ends at its step even if the batch of that step is left out."""
    spec = with_values(ten_steps(tmp_path), EVERY_3 | {"train.bad_step_action": "skip", HASHES: 1})

    def spoil(rank: Rank) -> None:
        real = TrainStep.run

        def run(self, number, batch, *rest):
            if number == 6 and rank.rank == 1:
                weight = to_local_no_grad(dict(rank.trainee.model.named_parameters())["head.weight"])
                kept = weight.clone()
                weight.fill_(float("nan"))
                try:
                    return real(self, number, batch, *rest)
                finally:
                    weight.copy_(kept)
            return real(self, number, batch, *rest)

        TrainStep.run = run

    assert int(run_loop(spec, tmp_path / "run", spoil).exit_code) == 0
    assert [event["step"] for event in events(tmp_path / "run", "bad_step")] == [6]
    assert [line["step"] for line in metrics(tmp_path / "run") if "validation_loss" in line] == [3, 6, 9, 10]
