"""Noise on the input of routers: its size, its gradient, and the same under parallel layouts as in one process."""

from functools import cache

import pytest
import torch
from forked_ranks import run_ranks
from oracle import assert_same, joined_stages, on_ranks, small_spec
from slow_cases import slow_but

from megalaunch.engine.model.dropout import RouterJitter, hash_ids, jitter_factors

MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "input_jitter": 0.3}


def test_factors_are_spread_evenly_and_act_on_the_gradient():
    tokens, features = hash_ids(torch.arange(64)), hash_ids(torch.arange(1000, 1064))
    factors = jitter_factors(tokens, features, 0.1)
    assert factors.min() >= 0.9
    assert factors.max() <= 1.1
    assert factors.mean().item() == pytest.approx(1, abs=2e-3)
    assert factors.std().item() == pytest.approx(0.2 / 12**0.5, rel=0.02)
    x = torch.randn(64, 64, requires_grad=True)
    y = RouterJitter(tokens.view(4, 16), features, 0.1)(x)
    y.sum().backward()
    torch.testing.assert_close(y, x * factors)
    torch.testing.assert_close(x.grad, factors)


def jittered_spec(moe=MOE, **sections):
    return small_spec(model__moe=moe, **{"parallel__dp": 1} | sections)


@cache
def alone():
    return joined_stages(run_ranks(1, on_ranks, jittered_spec(), True))


LAYOUTS = {
    "ep2, recomputed": {"parallel__dp": 2, "parallel__ep": 2, "recompute__granularity": "full"},
    "ep2tp2": {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__ep": 2},
    "cp2, experts recomputed": {
        "parallel__cp": 2,
        "recompute__granularity": "selective",
        "recompute__modules": ("moe",),
    },
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "ep2, recomputed"))
def test_layouts_have_the_numbers_of_one_process(layout):
    assert_same(joined_stages(run_ranks(2, on_ranks, jittered_spec(**LAYOUTS[layout]), True)), alone())


def test_it_changes_the_losses():
    plain = joined_stages(run_ranks(1, on_ranks, jittered_spec(MOE | {"input_jitter": 0.0}), True))
    assert abs(plain.losses[0] - alone().losses[0]) > 1e-6
