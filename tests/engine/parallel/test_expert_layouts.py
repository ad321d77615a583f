"""Mixtures of experts under parallel layouts against one process: every gradient, the norm, three steps, validation."""

from __future__ import annotations

import pytest
from oracle import few_samples, hold_to_one_process, small_spec
from slow_cases import slow_but

SMALL = {"model__vocab_size": 64, "model__moe": {"num_experts": 4, "top_k": 2}}
EXPERTS_IN_HALVES = {"parallel__dp": 2, "parallel__ep": 2}
FOUR_RANKS = {"parallel__dp": 4, "parallel__ep": 2, "batch__micro_batch_size": 1}
TWO_STAGES = {**EXPERTS_IN_HALVES, "parallel__pp": 2, "model__num_layers": 4, "batch__micro_batch_size": 1}
TENSOR = {"parallel__dp": 1, "parallel__tp": 2, "parallel__sequence_parallel": True}
slow = pytest.mark.slow
RELEASE = (pytest.mark.slow, pytest.mark.release)
WITHIN_TENSOR = {**TENSOR, "parallel__ep": 2}
WITHIN_EXPERTS = {"parallel__dp": 4, "parallel__ep": 2, "parallel__etp": 2}


def hold(dispatcher: str, layout: dict[str, object], **values: object) -> None:
    chosen = {**SMALL, **layout, **values, "parallel__moe_token_dispatcher_type": dispatcher}
    hold_to_one_process(small_spec(**few_samples(chosen)))


@pytest.mark.parametrize(
    ("dispatcher", "layout"),
    [
        pytest.param("alltoall", EXPERTS_IN_HALVES, id="alltoall-ep2"),
        pytest.param("allgather", EXPERTS_IN_HALVES, id="allgather-ep2"),
        pytest.param("alltoall", WITHIN_TENSOR, id="alltoall-ep2 over tp2", marks=RELEASE),
        pytest.param("allgather", WITHIN_TENSOR, id="allgather-ep2 over tp2", marks=slow),
        pytest.param("alltoall", WITHIN_EXPERTS, id="alltoall-ep2 etp2", marks=slow),
        pytest.param("allgather", WITHIN_EXPERTS, id="allgather-ep2 etp2", marks=RELEASE),
    ],
)
def test_tokens_are_sent_to_experts(dispatcher, layout):
    hold(dispatcher, layout)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"parallel__dp": 4, "parallel__ep": 4}, id="ep4", marks=slow),
        pytest.param({"parallel__dp": 2, "parallel__etp": 2}, id="etp2"),
        pytest.param({"parallel__dp": 1, "parallel__cp": 2, "parallel__ep": 2}, id="ep2 over cp2", marks=RELEASE),
        pytest.param({**TENSOR, "parallel__dp": 2, "parallel__ep": 2}, id="ep2 dp2 tp2", marks=RELEASE),
        pytest.param({**TENSOR, "parallel__ep": 2, "recompute__granularity": "full"}, id="recomputed", marks=RELEASE),
    ],
)
def test_axes(layout):
    hold("alltoall", layout)


@pytest.mark.parametrize(
    "sharding",
    slow_but(["no_shard", "optim", "optim_grads", "optim_grads_params"], "optim_grads_params", every=["optim_grads"]),
)
def test_experts_are_sharded_over_the_ranks_that_hold_them(sharding):
    hold("alltoall", FOUR_RANKS, parallel__data_sharding=sharding)


@pytest.mark.parametrize("sharding", slow_but(["optim", "optim_grads"], one_in=2))
def test_hybrid_sharding(sharding):
    """Two replicas of all parameters: experts have one shard each."""
    hold("alltoall", FOUR_RANKS, parallel__data_sharding=sharding, parallel__dp_replicate=2)


@pytest.mark.slow
def test_without_expert_parallelism_experts_are_sharded_over_tensor_parallel_ranks_too():
    layout = {**TENSOR, "parallel__dp": 2, "batch__micro_batch_size": 1}
    hold("alltoall", layout, parallel__data_sharding="optim_grads_params")


@pytest.mark.slow
def test_fewer_experts_than_ranks_are_sharded_within():
    """Two experts on each of four ranks: their rows are sharded."""
    layout = {"parallel__dp": 4, "batch__micro_batch_size": 1, "parallel__data_sharding": "optim_grads_params"}
    hold_to_one_process(small_spec(**SMALL | {"model__moe": {"num_experts": 2, "top_k": 2}}, **layout))


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    slow_but(
        [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)],
        ("zero_bubble", 2),
        every=[("1f1b", 1), ("interleaved", 2), ("dualpipev", 2)],
    ),
)
def test_pipelines(schedule, vpp):
    hold("alltoall", TWO_STAGES, parallel__schedule=schedule, parallel__vpp=vpp)


@pytest.mark.slow
@pytest.mark.release
def test_eight_ranks():
    hold("alltoall", {**TENSOR, "parallel__dp": 4, "parallel__ep": 4, "batch__micro_batch_size": 1})
