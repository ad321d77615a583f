"""Amax histories of delayed scaling: golden scales over steps, amaxes that are ignored, states in checkpoints."""

from __future__ import annotations

import math

import pytest
import torch

from megalaunch.engine.precision.amax_history import AmaxHistories
from megalaunch.kernels.float8_cast import E4M3, E5M2


def made(length=3, margin=0):
    layers = {"layers.0.a": None, "layers.0.b": None, "layers.0.experts": 4}
    return AmaxHistories(layers, length, (E4M3, E4M3, E5M2), margin, torch.device("cpu"))


def record(layer, operand, amax):
    layer.record(operand, torch.tensor(amax), torch.ones(()))


def step(histories, *microbatches):
    """One step in which the input of the second layer has these amaxes."""
    layer = histories.of_layer("layers.0.b")
    histories.begin_step()
    for amax in microbatches:
        record(layer, 0, [[amax]])
    histories.end_step(lambda amax: amax)
    return layer.scale(0).item()


@pytest.mark.parametrize(
    ("length", "margin", "scales"),
    [
        (3, 0, [448 / 4, 448 / 8, 448 / 8, 448 / 8, 448 / 2]),  # the maximum of three steps
        (3, 2, [112 / 4, 112 / 8, 112 / 8, 112 / 8, 112 / 2]),
        (1, 0, [448 / 4, 448 / 8, 448 / 2, 448 / 2, 448 / 1]),  # the most recent step
    ],
)
def test_golden_scales(length, margin, scales):
    histories = made(length, margin)
    assert not histories.has_scales
    found = [step(histories, *amaxes) for amaxes in ((1.0, 4.0), (8.0, 2.0), (2.0,), (2.0,), (1.0, 0.5))]
    assert histories.has_scales
    assert found == scales


def test_gradients_have_the_range_of_their_format():
    histories = made()
    layer = histories.of_layer("layers.0.a")
    record(layer, 2, [[7.0]])
    histories.end_step(lambda amax: amax)
    assert layer.scale(2).item() == 8192


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_an_amax_that_says_nothing_repeats_the_last_one(amax):
    histories = made()
    step(histories, 4.0)
    assert step(histories, amax) == 448 / 4
    assert histories.states()["fp8.layers.0.b.amax_history"][:, 0].tolist() == [4.0, 4.0, 0.0]


def test_passes_between_steps_make_no_entry():
    histories = made()
    step(histories, 4.0)
    record(histories.of_layer("layers.0.b"), 0, [[100.0]])  # a validation
    assert step(histories, 4.0) == 448 / 4


def test_before_the_first_entry_there_are_no_scales_after_a_resume_either():
    histories = made()
    histories.begin_step()
    record(histories.of_layer("layers.0.b"), 0, [[100.0]])  # of a skipped step
    histories.restored()
    assert not histories.has_scales
    assert step(histories, 4.0) == 448 / 4
    assert histories.has_scales


def test_the_maximum_over_ranks_counts():
    histories = made()
    histories.end_step(lambda amax: torch.full_like(amax, 14.0))
    assert histories.scale_n3.tolist() == [[32.0, 32.0, 4096.0]] * 6


def test_states_restore_the_scales():
    first, second = made(), made()
    step(first, 4.0)
    for name, state in second.states().items():
        state.copy_(first.states()[name])
    second.restored()
    assert second.has_scales
    assert torch.equal(second.scale_n3, first.scale_n3)


def test_experts_have_histories_of_their_own():
    """A rank notes those of its experts; an expert without tokens so far has no scale."""
    histories = made()
    mine = histories.of_experts("layers.0.experts", first=1, count=2)
    record(mine, 0, [[2.0], [0.0]])
    histories.end_step(lambda amax: amax)
    assert mine.scale(0)[0].item() == 224
    assert mine.is_known(0).flatten().tolist() == [True, False]
    assert histories.states()["fp8.layers.0.experts.amax_history"][:, 0, 0].tolist() == [0.0, 2.0, 0.0, 0.0]
