"""Unusual routing under layouts against one process: experts and ranks without tokens, and equal scores."""

from __future__ import annotations

import pytest
import torch
from oracle import Prepare, hold_to_one_process, small_spec
from slow_cases import slow_but

from megalaunch.engine.dtensor import copy_from_global_
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.init_value import init_value
from megalaunch.engine.model.model_parts import ModelParts

HALVES = {"parallel__dp": 2, "parallel__ep": 2}
SPLIT = {"parallel__dp": 1, "parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__ep": 2}
SHARDED = {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"}
# A weight of one expert is not normalized: it would be 1, and the router would have no gradient.
TOP_1 = {"num_experts": 4, "top_k": 1, "normalize_top_k": False}
BIASED = TOP_1 | {"score": "sigmoid", "balance_bias": True, "balance_bias_rate": 0.0}


def all_to_the_last_expert(model: Decoder | ModelParts) -> None:
    """Give the last expert a bias that no score reaches."""
    for name, buffer in model.named_buffers():
        if name.endswith("router.expert_bias"):
            buffer[-1] = 10


def pairs_of_equal_experts(model: Decoder | ModelParts) -> None:
    """Give each router pairs of equal rows: of the scores of every token two and two are equal."""
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            rows = init_value(name, parameter.shape, model.config, 0)
            copy_from_global_(parameter, rows[::2].repeat_interleave(2, dim=0))


def hold(moe: dict[str, object], layout: dict[str, object], dispatcher: str, prepare: Prepare | None = None) -> None:
    values = {"model__vocab_size": 64, "model__num_layers": 2, "parallel__moe_token_dispatcher_type": dispatcher}
    hold_to_one_process(small_spec(model__moe=moe, **values, **layout), prepare)


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    slow_but(
        [(HALVES, "alltoall"), (HALVES, "allgather"), (SPLIT, "alltoall"), (SHARDED, "alltoall")], (SPLIT, "alltoall")
    ),
    ids=["ep2", "ep2 allgather", "ep2 over tp2", "zero3"],
)
def test_all_tokens_go_to_one_expert(layout, dispatcher):
    """With ep2 the first rank's experts get no row at all."""
    hold(BIASED, layout, dispatcher, all_to_the_last_expert)


@pytest.mark.parametrize("layout", slow_but([HALVES, SHARDED], HALVES), ids=["ep2", "zero3"])
def test_experts_without_tokens_on_some_ranks(layout):
    """32 experts for the 32 tokens of a microbatch, one each: each gets a token only if none gets two."""
    hold(TOP_1 | {"num_experts": 32}, layout, "alltoall")


@pytest.mark.parametrize("layout", slow_but([HALVES, SPLIT], HALVES), ids=["ep2", "ep2 over tp2"])
def test_equal_scores_are_decided_alike(layout):
    hold(TOP_1, layout, "alltoall", pairs_of_equal_experts)


def test_pairs_are_equal():
    """The first of each pair is chosen, and never the second."""
    decoder = build_decoder(small_spec(model__moe=TOP_1).model)
    pairs_of_equal_experts(decoder)
    router = decoder.layers["0"].mlp.router
    chosen = router(torch.randn(50, 24), 1).expert_ids_Tk
    assert set(chosen.flatten().tolist()) == {0, 2}
