"""The batch of every step: ramps as they are written, and as Megatron's step schedule counts them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_specs import resolved

from megalaunch.plan.batch import (
    RampError,
    RampStage,
    batch_at,
    batch_gcd,
    format_rampup,
    get_rampup,
    mean_batch_share,
    parse_increments,
    parse_ramp,
    samples_after,
    samples_of_step,
    samples_requested,
    schedule_position,
    steps_by_size,
    steps_per_stage,
    tokens_requested,
)
from megalaunch.plan.cost import step_time
from megalaunch.plan.prediction import DAY, predict
from megalaunch.schema import with_values

SPEC = resolved("recipe=tiny", "data.corpus=x")[0]  # 32 tokens, 8 samples, 20 steps


def ramped(ramp, **values):
    return with_values(
        SPEC, {"batch.rampup_batch_size": ramp, **{key.replace("__", "."): v for key, v in values.items()}}
    )


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("0:512 2B:1024", [(0, 512), (2 * 10**9, 1024)]),
        ("0:768 250B:1536", [(0, 768), (250 * 10**9, 1536)]),
        ("0:4,1K:8", [(0, 4), (1000, 8)]),
        (" 0:1   1.5m:2 0.001t:3 ", [(0, 1), (1_500_000, 2), (10**9, 3)]),
        ("0.0015K:2", None),
        ("12345678901234567T:3", [(12345678901234567 * 10**12, 3)]),
    ],
)
def test_a_ramp_is_read_exactly(text, stages):
    if stages is None:
        with pytest.raises(RampError, match="is not an integer number of tokens"):
            parse_ramp(text)
        return
    assert [(stage.tokens, stage.samples) for stage in parse_ramp(text)] == stages


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", "is empty"),
        ("8", "'8' is not TOKENS:SAMPLES"),
        ("0:8 2X:16", "'2X:16' is not TOKENS:SAMPLES"),
        ("0:-8", "'0:-8' is not"),
        ("0:0", "'0:0' has 0 samples"),
        ("0:8.5", "'0:8.5' is not"),
        ("1e400:8", "'1e400:8' is not"),
    ],
)
def test_an_invalid_rampup_is_reported(text, overrides):
    with pytest.raises(RampError) as error:
        parse_ramp(text)
    assert overrides in str(error.value)


@settings(max_examples=60)
@given(st.lists(st.builds(RampStage, st.integers(0, 10**16), st.integers(1, 10**9)), min_size=1, max_size=4))
def test_what_is_written_is_what_is_read(stages):
    assert list(parse_ramp(format_rampup(stages))) == stages
    assert " " not in format_rampup(stages)


def test_without_a_ramp_every_step_is_alike():
    assert get_rampup(SPEC) == (RampStage(0, 8),)
    assert samples_requested(SPEC) == 160
    assert tokens_requested(SPEC) == 160 * 32
    assert steps_per_stage(SPEC) == (20,)
    assert batch_gcd(SPEC) == 8


def test_a_step_has_the_batch_of_the_last_threshold_that_was_reached():
    spec = ramped("0:2,320:4,1K:8")  # 10 samples; 31 samples (1000 // 32)
    assert [batch_at(spec, consumed) for consumed in (0, 9, 10, 30, 31, 500)] == [2, 2, 4, 4, 8, 8]
    assert steps_per_stage(spec) == (5, 6, 9)  # 10 samples by 2; to 34 by 4; the rest of 20 steps
    assert samples_requested(spec) == 10 + 24 + 72
    assert batch_gcd(spec) == 2


RAMPS = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 40)), max_size=4).map(
    lambda more: ",".join(["0:3", *(f"{tokens}:{size}" for tokens, size in sorted(dict(more).items()))])
)


@settings(max_examples=60, deadline=None)
@given(RAMPS, st.integers(1, 60))
def test_counting_by_stage_is_counting_step_by_step(ramp, steps):
    spec = ramped(ramp, train__steps=steps)
    consumed, taken = 0, dict.fromkeys(get_rampup(spec), 0)
    for _ in range(steps):
        size = batch_at(spec, consumed)
        reached = [stage for stage in get_rampup(spec) if stage.tokens // 32 <= consumed]
        taken[reached[-1]] += 1
        consumed += size
    assert samples_after(spec, steps) == consumed
    assert steps_per_stage(spec) == tuple(taken.values())


MEGATRON = [(16, 16, 5_859_375, 1536), (2, 2, 100, 8), (1, 1, 10, 4), (3, 1, 1000, 10), (8, 4, 97, 40), (4, 4, 6, 8)]


@pytest.mark.parametrize(("start", "increment", "ramp", "full"), MEGATRON)
def test_increments_are_those_of_megatron(start, increment, ramp, full):
    """Every step's batch as megatron-core's calculator has it, through the ramp and a little further."""
    calculators = pytest.importorskip(
        "megatron.core.num_microbatches_calculator",
        reason="megatron-core is not installed (pip install megalaunch[parity])",
    )
    theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, start, increment, ramp)
    spec = ramped(f"{start} {increment} {ramp}", batch__global_batch_size=full)
    stages, consumed, step = get_rampup(spec), 0, 0
    assert (stages[0].samples, stages[-1].samples, len(stages)) == (start, full, (full - start) // increment + 1)
    while consumed <= ramp + 3 * full and step < 500:
        step += 1
        theirs.update(consumed, False)
        assert samples_of_step(spec, step) == range(consumed, consumed + theirs.get_current_global_batch_size())
        consumed += theirs.get_current_global_batch_size()
    for stage in stages:  # each one begins at the sample where theirs does
        theirs.update(stage.tokens // 32, False)
        assert theirs.get_current_global_batch_size() == stage.samples
        if stage.tokens:
            theirs.update(stage.tokens // 32 - 1, False)
            assert theirs.get_current_global_batch_size() < stage.samples


def test_the_samples_of_a_ramp_are_a_golden():
    spec = ramped("2 2 12")  # three increments over 12 samples: at samples 4, 8 and 12
    sizes = [(r.start, len(r)) for r in (samples_of_step(spec, step) for step in range(1, 8))]
    assert sizes == [(0, 2), (2, 2), (4, 4), (8, 6), (14, 8), (22, 8), (30, 8)]
    assert [schedule_position(spec, step) for step in range(1, 7)] == [0.25, 0.5, 1, 1.75, 2.75, 3.75]
    assert list(steps_by_size(spec, 20 * 32)) == [(2, 2), (1, 4), (1, 6), (0.75, 8)]
    assert schedule_position(SPEC, 7) == 7
    assert resolved("recipe=tiny", "data.corpus=x", "batch.rampup_batch_size=2 2 12")[0].schedule.decay_steps == 17


@pytest.mark.parametrize("text", ["16 4 100", "3 2 10", "0 2 10", "2 0 10"])
def test_impossible_increments_are_reported(text):
    with pytest.raises(RampError, match="does not lead from"):
        parse_increments(text, 8, 32)
    assert parse_increments("0:4 1K:8", 8, 32) is None
    with pytest.raises(RampError, match="give a larger increment"):
        parse_increments("1 1 10", 20_000, 32)


def test_an_open_micro_batch_fits_every_batch_of_a_ramp():
    overrides = (
        "recipe=tiny",
        "data.corpus=x",
        "batch.micro_batch_size=null",
        "parallel.dp=2",
        "batch.max_micro_batch_size=null",
    )
    assert resolved(*overrides)[0].batch.micro_batch_size == 4
    assert resolved(*overrides, "batch.rampup_batch_size=0:4,1K:8")[0].batch.micro_batch_size == 2
    assert resolved(*overrides, "batch.rampup_batch_size=0:4,640:8")[0].data.num_samples == 5 * 4 + 15 * 8
    assert (
        resolved(*overrides, "batch.rampup_batch_size=nonsense")[0].batch.micro_batch_size == 4
    )  # a rule says what is wrong


def test_the_time_of_a_ramp_is_that_of_its_steps():
    """A step's time is linear in its batch: two step times give those of all stages."""
    overrides = ("recipe=llama3_8b", "data.mock=true", "parallel=tp2pp2", "train.steps=100")
    constant = resolved(*overrides, "batch.global_batch_size=64")[0]
    ramp = with_values(constant, {"batch.rampup_batch_size": "16 16 160"})  # 4 steps of 16, 2 of 32, 1 of 48
    steps = list(steps_by_size(ramp, tokens_requested(ramp)))
    seconds = sum(
        count * step_time(with_values(constant, {"batch.global_batch_size": size})).total for count, size in steps
    )
    assert sum(count for count, _ in steps) == pytest.approx(100)
    assert predict(ramp).days * DAY == pytest.approx(seconds, rel=1e-9)
    assert predict(constant).days * DAY == pytest.approx(100 * step_time(constant).total)


def test_the_mean_batch_of_some_steps():
    spec = ramped("2 2 12")  # 2 2 4 6 8 8 ...
    assert mean_batch_share(spec, 1, 4) == 14 / 32
    assert mean_batch_share(spec, 5, 9) == 1
    assert mean_batch_share(spec, 9, 8) == mean_batch_share(SPEC, 1, 4) == 1
