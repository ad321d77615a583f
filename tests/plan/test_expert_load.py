"""The stated imbalance of the experts' load: rows of the busiest rank, and what they cost in time and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_specs import resolved

from megalaunch.plan.cost import step_time
from megalaunch.plan.expert_rows import ExpertRows
from megalaunch.plan.memory import predict_memory
from megalaunch.plan.prediction import ExpertWork
from megalaunch.plan.topology import Topology
from megalaunch.schema.moe import MoESpec

MIXTRAL = ("model=mixtral_8x7b", "platform=h100", "cluster.nodes=1", "cluster.devices_per_node=8", "precision=bf16",
           "batch.sequence_length=4096", "batch.global_batch_size=64", "train.steps=1")  # fmt: skip
MOE = MoESpec(num_experts=16, top_k=4)
IMBALANCE = "parallel.moe_load_imbalance=2"


def _rows(moe: MoESpec = MOE, ep: int = 4, etp: int = 1, sharing: int = 1, imbalance: float = 1.0) -> ExpertRows:
    return ExpertRows.of(moe, ep, etp, sharing, imbalance)


def test_a_balanced_rank_gets_as_many_rows_as_it_sends():
    assert _rows() == ExpertRows(4, 4)


def test_the_busiest_rank_gets_its_multiple():
    assert _rows(imbalance=1.5) == ExpertRows(4, 6)
    assert _rows(imbalance=1.5, etp=2) == ExpertRows(4, 12)  # those for both halves of an expert


@pytest.mark.parametrize(
    ("moe", "ep", "most"),
    [
        (MOE, 1, 4),  # one rank has all experts, and all the load
        (MOE, 2, 8),  # all tokens to one of two ranks
        (MOE, 16, 16),  # one row for each token of 16 ranks and the one expert of a rank
        (replace(MOE, capacity_factor=1.25), 8, 5),
        (replace(MOE, capacity_factor=0.5), 8, 4),
    ],
)
def test_no_rank_gets_more_than_there_can_be(moe, ep, most):
    assert _rows(moe, ep, imbalance=100) == ExpertRows(4, most)


def test_padded_rows_do_not_depend_on_the_load():
    padded = replace(MOE, capacity_factor=1.5, pad_to_capacity=True)
    assert _rows(padded, imbalance=3) == _rows(padded) == ExpertRows(6, 6)
    assert _rows(padded, sharing=4) == ExpertRows(16, 16)  # no more than a rank's tokens to each expert


def test_time_and_memory_of_experts_follow_the_busiest_rank():
    even, uneven = (resolved(*MIXTRAL, "parallel=ep8", *more)[0] for more in ((), (IMBALANCE,)))
    time, busiest = step_time(even), step_time(uneven)
    assert busiest.grouped == pytest.approx(2 * time.grouped, rel=0.05)  # larger matmuls are a little faster
    assert busiest.matmul - busiest.grouped == pytest.approx(time.matmul - time.grouped)
    assert busiest.communication["ep"].exposed == pytest.approx(2 * time.communication["ep"].exposed)
    assert busiest.attention == time.attention
    assert busiest.permutation == time.permutation  # of its own tokens
    assert busiest.tokens_per_second_per_device < time.tokens_per_second_per_device
    memory, fullest = predict_memory(even), predict_memory(uneven)
    assert fullest.activations > 1.3 * memory.activations
    assert (fullest.weights, fullest.optimizer) == (memory.weights, memory.optimizer)


def test_without_expert_parallelism_the_load_makes_no_difference():
    even, uneven = (resolved(*MIXTRAL, "parallel=zero3", *more)[0] for more in ((), (IMBALANCE,)))
    assert step_time(uneven) == step_time(even)
    assert predict_memory(uneven) == predict_memory(even)


def test_an_all_gather_brings_the_same_tokens_to_every_rank():
    gathered = (*MIXTRAL, "parallel=ep4", "parallel.moe_token_dispatcher_type=allgather")
    even, uneven = (resolved(*gathered, *more)[0] for more in ((), (IMBALANCE,)))
    assert step_time(uneven).communication["ep"] == step_time(even).communication["ep"]
    sent = resolved(*MIXTRAL, "parallel=ep4")[0]  # 2 rows a token, in place of each token to 4 ranks
    assert step_time(even).communication["ep"].exposed == pytest.approx(2 * step_time(sent).communication["ep"].exposed)


def test_experts_split_over_ranks_compute_the_rows_of_all_of_them():
    """Without tensor parallelism, too: a rank has half the width of twice as many rows."""
    whole, halves = (resolved(*MIXTRAL, f"parallel={name}")[0] for name in ("ep4", "ep4etp2"))
    assert step_time(halves).grouped == pytest.approx(step_time(whole).grouped, rel=0.05)


def test_padding_is_computed_too():
    limited = ("model.moe.capacity_factor=1.5", "model.moe.balance_loss=batch", "model.moe.balance_loss_coeff=0.01")
    plain, padded = (
        resolved(*MIXTRAL, "parallel=ep8", *limited, *more)[0] for more in ((), ("model.moe.pad_to_capacity=true",))
    )
    assert step_time(padded).grouped == pytest.approx(1.5 * step_time(plain).grouped, rel=0.05)


def test_the_work_of_a_rank_is_reported():
    spec = resolved(*MIXTRAL, "parallel=ep4", "parallel.moe_load_imbalance=1.5")[0]
    work = ExpertWork.from_spec(spec, Topology.from_spec(spec))
    assert work == ExpertWork(
        imbalance=1.5,
        parameters=32 * 2 * 3 * 4096 * 14336,  # of 8 experts two, in 32 layers
        edp=2,
        rows=1.5 * 2 * 4096,
        dispatch_bytes=1.5 * 2 * 4096 * 4096 * 2,
    )
    dense = resolved("recipe=llama3_8b", "parallel=tp4pp4")[0]
    assert ExpertWork.from_spec(dense, Topology.from_spec(dense)) is None
