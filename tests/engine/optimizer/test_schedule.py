"""The learning rate against values that Megatron-LM's own scheduler printed (max 1e-3, min 1e-4, W=10, D=100)."""

import pytest

from megalaunch.engine.optimizer.learning_rate import embedding_learning_rate, learning_rate
from megalaunch.schema.schedule import ScheduleSpec

STEPS = (5, 10, 55, 90, 100, 101)
GOLDENS = {
    "linear": (5e-4, 1e-3, 5.5e-4, 2e-4, 1e-4, 1e-4),
    "cosine": (5e-4, 1e-3, 5.5e-4, 1.271383e-4, 1e-4, 1e-4),
    "inverse_square_root": (5e-4, 1e-3, 4.264014e-4, 3.333333e-4, 3.162278e-4, 1e-4),
    "constant": (5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3),
}


@pytest.mark.parametrize("shape", GOLDENS)
def test_megatron_goldens(shape):
    schedule = ScheduleSpec(shape=shape, warmup_steps=10, decay_steps=100, min_lr=1e-4)
    assert [learning_rate(schedule, 1e-3, step) for step in STEPS] == pytest.approx(GOLDENS[shape], rel=1e-6)


@pytest.mark.parametrize(
    ("fall", "at_90"),
    [("exponential", 4.727922e-4), ("minus_sqrt", 3.636039e-4), ("linear", 5.5e-4), ("cosine", 5.5e-4)],
)
def test_wsd_goldens(fall, at_90):
    schedule = ScheduleSpec(
        shape="wsd", warmup_steps=10, decay_steps=100, min_lr=1e-4, wsd_decay_steps=20, wsd_decay_shape=fall
    )
    rates = [learning_rate(schedule, 1e-3, step) for step in (55, 80, 90, 101)]
    assert rates == pytest.approx((1e-3, 1e-3, at_90, 1e-4), rel=1e-6)


def test_a_warmup_from_above_zero():
    """Megatron-LM: init + (max - init) * step / warmup."""
    schedule = ScheduleSpec(shape="constant", warmup_steps=10, warmup_init_lr=1e-4, decay_steps=100)
    rates = [learning_rate(schedule, 1e-3, step) for step in (1, 5, 10)]
    assert rates == pytest.approx((1.9e-4, 5.5e-4, 1e-3), rel=1e-9)


def test_embedding_and_head_fall_to_a_rate_of_their_own():
    """Megatron-LM's groups with --decoupled-lr 2e-3 and --decoupled-min-lr 4e-4, halfway and after the decay."""
    given = {"shape": "linear", "warmup_steps": 10, "decay_steps": 100, "min_lr": 1e-4}
    own = ScheduleSpec(**given, embedding_min_lr=4e-4)
    assert [embedding_learning_rate(own, 2e-3, step) for step in (5, 55, 101)] == pytest.approx((1e-3, 1.2e-3, 4e-4))
    shared = ScheduleSpec(**given)
    assert [embedding_learning_rate(shared, 2e-3, step) for step in (55, 101)] == pytest.approx((1.05e-3, 1e-4))
    assert embedding_learning_rate(own, None, 55) is None


def test_without_warmup_the_first_rate_is_near_the_peak():
    schedule = ScheduleSpec(shape="linear", decay_steps=10, min_lr=0.0)
    assert learning_rate(schedule, 1.0, 1) == pytest.approx(0.9)


def test_an_unresolved_horizon_is_named():
    with pytest.raises(ValueError, match=r"schedule\.decay_steps"):
        learning_rate(ScheduleSpec(), 1.0, 1)
