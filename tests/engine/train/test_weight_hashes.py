"""One flipped bit in a replica of the weights is found, and its rank named; no such state is saved."""

from __future__ import annotations

import pytest
import torch
from looped_run import Rank, events, run_loop, ten_steps

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.engine.train.weight_hashes import hash_tensor
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values

EVERY_4 = {"train.check_weight_hash_across_dp_replicas_interval": 4, "checkpoint.interval": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_flipped_bit_changes_the_hash(dtype):
    values = torch.randn(7, 3).mul(50).to(dtype)
    bits = values.view(-1).view(torch.uint8)
    before = hash_tensor(values)
    assert before == hash_tensor(values.clone())
    for byte in range(len(bits)):
        for bit in range(8):
            bits[byte] ^= 1 << bit
            assert hash_tensor(values) != before
            bits[byte] ^= 1 << bit
    assert hash_tensor(values.flip(0)) != before


def flip_on(rank: Rank, which: int, name: str) -> None:
    """Flip the lowest bit of a weight of one rank before step 6."""
    real = TrainStep.run

    def run(self, number, *rest):
        if number == 6 and rank.rank == which:
            weight = to_local_no_grad(dict(rank.trainee.model.named_parameters())[name])
            weight.view(-1).view(torch.uint8)[0] ^= 1
        return real(self, number, *rest)

    TrainStep.run = run


def spec_of(folder, **values: object):
    return with_values(ten_steps(folder), EVERY_4 | {key.replace("__", "."): value for key, value in values.items()})


def test_the_odd_one_of_three_replicas_is_named(tmp_path):
    spec = spec_of(
        tmp_path,
        parallel__dp=3,
        parallel__dp_replicate=3,
        parallel__data_sharding="no_shard",
        cluster__devices_per_node=3,
        batch__global_batch_size=6,
    )
    name = "layers.1.mlp.down_proj.weight"
    ending = run_loop(spec, tmp_path / "run", lambda rank: flip_on(rank, 1, name))
    assert (int(ending.exit_code), ending.step) == (7, 6)  # step 6 saves: it is compared before
    assert "silent corruption between steps 5 and 6: rank 1 (dp1) on" in ending.reason
    assert "differs from the other replicas, in model.layers.1.mlp.down_proj.weight" in ending.reason
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [2, 4]
    assert int(run_loop(spec, tmp_path / "run").exit_code) == 0  # from the checkpoint of step 4, without the flip
    assert RunDirectory(tmp_path / "run").checkpoint(10).is_dir()


@pytest.mark.slow
def test_of_two_replicas_over_tp_one_is_wrong(tmp_path):
    spec = spec_of(tmp_path, parallel__dp=1, parallel__tp=2, checkpoint__interval=0)
    ending = run_loop(spec, tmp_path / "run", lambda rank: flip_on(rank, 0, "layers.1.mlp_norm.weight"))
    assert (int(ending.exit_code), ending.step) == (7, 8)
    assert "silent corruption between steps 5 and 8: one of rank 0 (tp0) on" in ending.reason
    assert "is wrong: their replicas differ" in ending.reason
