"""The loss scale grows, falls and waits by Megatron's rules, and is read from checkpoints only if it is valid."""

from __future__ import annotations

import pytest

from megalaunch.engine.precision.loss_scale import LossScale, UpdateState
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.schema.precision import LossScaleSpec, PrecisionSpec

FP16 = PrecisionSpec(compute_dtype="fp16", loss_scale=LossScaleSpec(initial=64.0, minimum=8.0, window=3, hysteresis=2))


def _scales(steps: str) -> list[float]:
    """The scales after each step: o for an overflow, . for none."""
    state, found = UpdateState().with_scale(FP16), []
    for step in steps:
        state = state.after(FP16.loss_scale, skipped=step == "o", overflowed=step == "o")
        found.append(state.factor)
    assert state.skipped_steps == steps.count("o")
    return found


@pytest.mark.parametrize(
    ("steps", "scales"),
    [
        ("......", [64, 64, 128, 128, 128, 256]),  # doubles after `window` steps in a row
        ("..o...", [64, 64, 64, 64, 64, 128]),  # an overflow starts the count again
        ("oo", [64, 32]),  # the first overflow is forgiven
        ("o..o", [64, 64, 64, 32]),  # steps without overflow do not forgive it: Megatron's hysteresis
        ("oooo", [64, 32, 16, 8]),  # once it falls, every overflow halves it
        ("oo.o", [64, 32, 32, 16]),
        ("oo...o", [64, 32, 32, 32, 64, 64]),  # growth forgives again
        ("oooooo", [64, 32, 16, 8, 8, 8]),  # not below the minimum
    ],
)
def test_the_scale_follows_megatron(steps, scales):
    assert _scales(steps) == scales


def test_steps_are_skipped_until_the_minimum_overflows():
    spec, state = FP16.loss_scale, UpdateState().with_scale(FP16)
    may = []
    for _ in range(5):
        may.append(state.may_skip(spec))
        state = state.after(spec, skipped=True, overflowed=True)
    assert may == [True, True, True, True, False]  # 64, 64, 32, 16, 8
    constant = LossScaleSpec(initial=8.0, minimum=8.0, hysteresis=2)
    assert LossScale(8.0, 0, 2).is_exhausted(constant) is False
    assert LossScale(8.0, 0, 2).after_overflow(constant).is_exhausted(constant) is True


CONSTANT = PrecisionSpec(
    compute_dtype="fp16", loss_scale=LossScaleSpec(constant=256.0, minimum=512.0, window=1, hysteresis=1)
)


def test_a_constant_scale_skips_every_overflow_and_stays():
    """Megatron's ConstantGradScaler, whatever the settings of the dynamic one are."""
    spec, state = CONSTANT.loss_scale, UpdateState().with_scale(CONSTANT)
    for overflowed in (True, True, True, False, False, True):
        assert (state.factor, state.may_skip(spec)) == (256.0, True)
        state = state.after(spec, skipped=overflowed, overflowed=overflowed)
    assert (state.factor, state.skipped_steps) == (256.0, 4)


def test_a_branch_with_other_scaling_goes_on_with_its_own():
    dynamic = UpdateState(2, LossScale(32.0, 1, 0))
    constant = dynamic.with_scale(CONSTANT)
    assert (constant.factor, constant.skipped_steps) == (256.0, 2)
    assert constant.with_scale(FP16).factor == 256.0, "a dynamic scale goes on from the constant one"
    assert dynamic.with_scale(FP16) == dynamic
    assert dynamic.with_scale(PrecisionSpec(compute_dtype="bf16")) == UpdateState(2)


def test_other_dtypes_have_no_scale():
    state = UpdateState().with_scale(PrecisionSpec(compute_dtype="bf16"))
    assert state == UpdateState()
    assert (state.factor, state.may_skip(FP16.loss_scale)) == (1.0, False)


def test_progress_is_read_as_it_was_written():
    scaled = TrainProgress(7, 70, UpdateState(2, LossScale(32.0, 1, 0)))
    assert TrainProgress.from_document(scaled.to_document()) == scaled
    assert scaled.num_updates == 5
    plain = TrainProgress(7, 70)
    assert plain.to_document() == {"step": 7, "tokens": 70}
    assert TrainProgress.from_document(plain.to_document()) == plain


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (None, "no step and tokens"),
        ({"step": 7}, "no step and tokens"),
        ({"step": -1, "tokens": 0}, "no step and tokens"),
        ({"step": "7", "tokens": 70}, "no step and tokens"),
        ({"step": 7, "tokens": 70, "skipped_steps": 8}, "no valid number of skipped steps"),
        ({"step": 7, "tokens": 70, "loss_scale": 32.0}, "no valid loss scale"),
        ({"step": 7, "tokens": 70, "loss_scale": {"scale": -1.0, "good_steps": 0, "overflows_left": 2}}, "no valid"),
    ],
)
def test_a_document_that_no_run_wrote_is_refused(document, problem):
    with pytest.raises(ValueError, match=problem):
        TrainProgress.from_document(document)
