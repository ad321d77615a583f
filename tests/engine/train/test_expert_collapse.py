"""Rows of steps in which one expert gets most tokens: when they are warned of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from oracle import small_spec

from megalaunch.engine.model.moe.load import ExpertStats
from megalaunch.engine.train.step_guards import ExpertCollapseGuard
from megalaunch.engine.train.train_step import StepResult


def warnings(loads: list[list[float]], top_k: int = 1, share: float = 0.75) -> list[tuple[int, int, float]]:
    """(step, layer, share) of every warning, for the load per step and layer over the mean of 4 experts."""
    spec = small_spec(
        model__moe={"num_experts": 4, "top_k": top_k},
        train__expert_collapse_share=share,
        train__expert_collapse_steps=2,
    )
    warned: list[tuple[int, int, float]] = []
    record = SimpleNamespace(event=lambda name, step, layer, share, steps: warned.append((step, layer, share)))
    guard = ExpertCollapseGuard(spec, (1, 3))
    for step, load in enumerate(loads, 1):
        experts = ExpertStats(0.0, 0.0, load, [0.5] * len(load), [0.5] * len(load), [0.0] * len(load))
        guard.update(step, StepResult(2.0, 1.0, 1e-3, 64, None, experts), record)
    return warned


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([[3.2, 1.0], [3.6, 1.0], [3.6, 1.0]], [(2, 1, 0.9)]),  # once a row
        ([[1.0, 4.0], [1.0, 1.0], [1.0, 4.0], [1.0, 4.0]], [(4, 3, 1.0)]),
        ([[3.0, 3.0], [3.0, 3.0]], []),  # not above the share
    ],
)
def test_a_layer_is_warned_of_once_a_row(loads, expected):
    assert warnings(loads) == [pytest.approx(row) for row in expected]


def test_an_even_load_above_the_share_is_no_collapse():
    assert warnings([[1.2, 1.0]] * 3, top_k=4) == []
    assert warnings([[4.0, 4.0]] * 3, share=1.0) == []


def test_a_dense_model_has_no_load():
    ExpertCollapseGuard(small_spec(), ()).update(1, StepResult(2.0, 1.0, 1e-3, 64, None), SimpleNamespace())
