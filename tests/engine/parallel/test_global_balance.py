"""The balance loss over the global batch under parallel layouts, held to one process."""

from functools import cache

import pytest
from forked_ranks import run_ranks
from oracle import assert_same, joined_stages, on_ranks, small_spec
from slow_cases import slow_but

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "balance_loss": "global", "balance_loss_coeff": 0.5}


def balanced_spec(moe=None, **parallel):
    layout = {f"parallel__{key}": value for key, value in ({"dp": 1} | parallel).items()}
    return small_spec(model__moe=MOE | (moe or {}), model__num_layers=4, **layout)


@cache
def alone(**moe):
    return joined_stages(run_ranks(1, on_ranks, balanced_spec(moe), True))


LAYOUTS = {"ep2": {"dp": 2, "ep": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2, "schedule": "1f1b"}}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "ep2"))
def test_layouts_have_the_numbers_of_one_process(layout):
    assert_same(joined_stages(run_ranks(2, on_ranks, balanced_spec(**LAYOUTS[layout]), True)), alone())


def test_it_acts_from_the_second_step():
    ours, plain = alone(), alone(balance_loss="none", balance_loss_coeff=0.0)
    assert ours.norms[0] == pytest.approx(plain.norms[0], rel=1e-6)
    assert abs(ours.norms[1] - plain.norms[1]) > 1e-4
