"""Curves with fewer points, and places on the axes of settings."""

from __future__ import annotations

import math

import pytest

from megalaunch.runs.report.charts import thin
from megalaunch.runs.report.importance import axis_places, setting_importance


def test_a_short_curve_is_drawn_whole():
    assert thin([1, 2, 3], [5.0, 4.0, 3.0]) == ([1, 2, 3], [5.0, 4.0, 3.0])


def test_a_long_curve_keeps_its_spikes():
    values = [1.0] * 100_000
    values[77_777], values[33_333], values[5] = 9.0, -9.0, float("nan")
    at, kept = thin(list(range(100_000)), values)
    assert len(at) <= 1000
    assert kept[at.index(77_777)] == 9.0
    assert kept[at.index(33_333)] == -9.0
    assert not any(map(math.isnan, kept))
    assert at == sorted(at)


def test_a_stretch_without_a_number_stays_empty():
    at, kept = thin(list(range(4000)), [float("nan")] * 4000)
    assert len(at) <= 1000
    assert all(map(math.isnan, kept))


def test_numbers_are_placed_by_value():
    places, ticks = axis_places([1, 3, 2])
    assert places == [0.0, 1.0, 0.5]
    assert ticks == [(0.0, "1"), (0.5, "2"), (1.0, "3")]
    places, _ = axis_places([0.0001, 0.001, 0.01])  # learning rates: logarithmic
    assert places == pytest.approx([0.0, 0.5, 1.0])
    assert axis_places([0.0, 1.0, 100.0])[0] == pytest.approx([0.0, 0.01, 1.0])  # zero has no logarithm
    assert axis_places([4, 4])[0] == [0.0, 0.0]


def test_other_values_are_placed_in_order():
    places, ticks = axis_places(["silu", "gelu", None, "gelu"])
    assert ticks == [(0.0, "gelu"), (0.5, "null"), (1.0, "silu")]
    assert places == [1.0, 0.0, 0.5, 0.0]
    assert axis_places([True, False])[1] == [(0.0, "false"), (1.0, "true")]


def test_importance_finds_the_setting_that_decides():
    grid = [(lr, seed, kind) for lr in (0.1, 0.2, 0.3, 0.4) for seed in (1, 2, 3) for kind in ("a", "b")]
    scores = [(lr - 0.1) ** 2 + 1e-4 * seed for lr, seed, _ in grid]
    settings = [
        ("optimizer.lr", [lr for lr, _, _ in grid]),
        ("train.seed", [seed for _, seed, _ in grid]),
        ("model.activation", [kind for *_, kind in grid]),
    ]
    found = setting_importance(settings, scores)
    assert found is not None
    assert found[0][0] == "optimizer.lr"
    assert found[0][1] > 0.8
    assert sum(share for _, share in found) == pytest.approx(1.0)
    assert setting_importance([(key, values[:7]) for key, values in settings], scores[:7]) is None
