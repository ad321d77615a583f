"""A Sinkhorn assignment under layouts whose ranks share a microbatch, held to one rank."""

from __future__ import annotations

from functools import cache

import pytest
from forked_ranks import run_ranks
from oracle import assert_same, joined_stages, on_ranks, small_spec
from slow_cases import slow_but

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "choice": "sinkhorn", "normalize_top_k": False}


def balanced_spec(**parallel):
    layout = {f"parallel__{key}": value for key, value in ({"dp": 1} | parallel).items()}
    return small_spec(model__moe=MOE, model__vocab_size=64, **layout)


@cache
def alone():
    return joined_stages(run_ranks(1, on_ranks, balanced_spec(), True))


LAYOUTS = {"cp2": {"cp": 2}, "tp2 ep2": {"tp": 2, "sequence_parallel": True, "ep": 2}}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "tp2 ep2"))
def test_layouts_have_the_numbers_of_one_process(layout):
    assert_same(joined_stages(run_ranks(2, on_ranks, balanced_spec(**LAYOUTS[layout]), True)), alone())
