"""Mixture of experts under expert parallelism against one process: every gradient, the norm, three steps, validation."""

from __future__ import annotations

import pytest
from oracle import hold_to_one_process, small_spec
from slow_cases import slow_but

MOE = {"num_experts": 4, "top_k": 2}


def hold(dispatcher: str = "alltoall", **values: object) -> None:
    values = {"parallel__dp": 1, "model__vocab_size": 64, "model__moe": MOE, **values}
    hold_to_one_process(small_spec(**values, parallel__moe_token_dispatcher_type=dispatcher))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_two_blocks_of_experts(dispatcher):
    hold(dispatcher, parallel__dp=2, parallel__ep=2)
