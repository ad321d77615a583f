"""Dropout draws the same masks under every layout and in a recomputed pass; rates are those that were asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from oracle import few_samples, hold_to_one_process, one_process, small_spec
from slow_cases import slow_but

from megalaunch.schema import with_values

DROPOUT: dict[str, Any] = {
    "model__hidden_dropout": 0.2,
    "model__attention_dropout": 0.3,
    "model__vocab_size": 64,
    "model__num_layers": 2,
    "model__num_attention_heads": 8,
    "model__num_query_groups": 2,
    "model__head_dim": 4,
}
SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2 sp": SP,
    "cp2 ring": {"cp": 2, "cp_comm_type": "p2p"},
    "cp2 allgather": {"cp": 2, "cp_comm_type": "allgather"},
    "cp2 a2a": {"cp": 2, "cp_comm_type": "a2a"},
    "cp4 on two levels, tp2 sp": {
        **SP,
        "cp": 4,
        "cp_comm_type": "a2a+p2p",
        "hierarchical_context_parallel_sizes": (2, 2),
    },
    "pp2": {"pp": 2, "schedule": "1f1b"},
    "tp2 pp2 dp2": {"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b"},
}
AGAIN: dict[str, dict[str, Any]] = {
    "full": {"recompute__granularity": "full"},
    "parts": {"recompute__granularity": "selective", "recompute__modules": ["attention", "norm", "mlp"]},
}


def _spec(layout: dict[str, Any], **values: Any) -> Any:
    sizes = {f"parallel__{key}": value for key, value in layout.items()}
    return small_spec(**few_samples({"parallel__dp": 1, **DROPOUT, **sizes, **values}))


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "tp2 sp", every=["cp2 ring", "cp2 a2a", "pp2", "tp2"]))
def test_every_gradient_is_that_of_one_process(layout):
    hold_to_one_process(_spec(LAYOUTS[layout]))


@pytest.mark.parametrize(
    ("layout", "again"),
    [
        pytest.param("dp2", "full", marks=pytest.mark.slow),
        ("cp2 ring", "parts"),
        pytest.param("tp2 sp", "full", marks=pytest.mark.slow),
        pytest.param("tp2 pp2 dp2", "parts", marks=(pytest.mark.slow, pytest.mark.release)),
    ],
)
def test_a_recomputed_pass_draws_the_same(layout, again):
    hold_to_one_process(_spec(LAYOUTS[layout], **AGAIN[again]))


def test_no_layout_hides_that_nothing_is_dropped():
    spec = _spec({"dp": 1})
    plain = one_process(with_values(spec, {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}))
    hidden, weights = (
        one_process(with_values(spec, {f"model.{key}": 0.0})) for key in ("attention_dropout", "hidden_dropout")
    )
    losses = [numbers.losses for numbers in (plain, hidden, weights, one_process(spec))]
    assert all(abs(a[0] - b[0]) > 1e-5 for a, b in itertools.combinations(losses, 2)), losses
