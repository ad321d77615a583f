"""The sampler that learns: what it proposes is legal, repeatable, and nearer to what scored well."""

from __future__ import annotations

import math

import pytest

from megalaunch.runs.sweep.overrides import parse_sweep

pytest.importorskip("optuna")
from megalaunch.runs.sweep.sampling import TreeSampler

AXES = parse_sweep(
    ["optimizer.lr=tag(log,interval(1e-5,1e-1))", "schedule=cosine,linear", "train.seed=int(interval(1,9))"]
).axes


def loss(values):
    """Lowest at lr 1e-3, whatever the rest."""
    return abs(math.log10(float(values["optimizer.lr"])) + 3)


def proposals(metric, count):
    sampler = TreeSampler(AXES, metric, seed=3)
    found = []
    for _ in range(count):
        values = sampler.propose()
        found.append(values)
        sampler.learn(values, loss(values))
    return found


def test_it_proposes_what_the_overrides_allow_and_the_same_again():
    found = proposals("validation_loss", 12)
    assert found == proposals("validation_loss", 12)
    for values in found:
        assert list(values) == list(AXES)
        assert 1e-5 <= float(values["optimizer.lr"]) <= 1e-1
        assert values["schedule"] in ("cosine", "linear")
        assert int(values["train.seed"]) in range(1, 10)


def test_it_seeks_low_losses_and_high_speeds():
    low = [loss(values) for values in proposals("validation_loss", 40)[-15:]]
    high = [loss(values) for values in proposals("tokens_per_second", 40)[-15:]]
    assert sum(low) / 15 < 0.75 < 1.2 < sum(high) / 15  # by chance: 1.0


def test_a_trial_that_failed_teaches_nothing_and_harms_nothing():
    sampler = TreeSampler(AXES, "validation_loss", seed=3)
    for _ in range(6):
        sampler.learn(sampler.propose(), None)
    assert set(sampler.propose()) == set(AXES)
