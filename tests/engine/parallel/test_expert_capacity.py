"""Experts with a capacity under parallel layouts: the tokens that are dropped are those of one process."""

import itertools
from functools import cache

import pytest
from forked_ranks import run_ranks
from oracle import assert_same, joined_stages, on_ranks, small_spec
from slow_cases import slow_but

SOFTMAX = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
MODELS = {policy: SOFTMAX | {"capacity_factor": 1.0, "drop_policy": policy} for policy in ("probs", "position")}
MODELS["dropless"] = SOFTMAX


def capacity_spec(moe, **parallel):
    return small_spec(model__moe=moe, **{f"parallel__{key}": value for key, value in ({"dp": 1} | parallel).items()})


@cache
def alone(model):
    """Three steps on one rank, with the microbatches of the layouts."""
    return joined_stages(run_ranks(1, on_ranks, capacity_spec(MODELS[model]), True))


CASES = {
    "ep2tp2, padded": ("probs", True, {"tp": 2, "sequence_parallel": True, "ep": 2}),
    "ep2, padded": ("position", True, {"dp": 2, "ep": 2}),
    "ep2, padded halves": ("probs", True, {"dp": 2, "ep": 2, "overlap_moe_expert_parallel_comm": True}),
    "ep2cp2": ("position", False, {"cp": 2, "ep": 2}),
    "ep2, all-gather": ("probs", False, {"dp": 2, "ep": 2, "moe_token_dispatcher_type": "allgather"}),
}


@pytest.mark.parametrize(
    "case", slow_but(CASES, "ep2, padded", "ep2, all-gather", every=["ep2cp2", "ep2, padded halves"])
)
def test_layouts_drop_the_tokens_of_one_process(case):
    policy, pad, layout = CASES[case]
    spec = capacity_spec(MODELS[policy] | {"pad_to_capacity": pad}, **layout)
    assert_same(joined_stages(run_ranks(2, on_ranks, spec, True)), alone(policy))


def test_policies_drop_different_tokens():
    losses = [alone(name).losses for name in MODELS]
    assert all(abs(a[0] - b[0]) > 1e-5 for a, b in itertools.combinations(losses, 2))
