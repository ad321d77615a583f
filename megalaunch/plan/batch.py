"""Batch math: the samples and tokens of each step, with or without a batch size rampup."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from megalaunch.schema import RunSpec

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ENTRY = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?):(\d{1,18})", re.IGNORECASE)
_INCREMENTS = re.compile(r"\s*(\d{1,18})[\s,]+(\d{1,18})[\s,]+(\d{1,18})\s*")
_MOST_STAGES = 10_000
_UNLIMITED = 10**18  # steps


class RampError(ValueError):
    """The text is not a batch size rampup; the message names the invalid entry and the reason."""


@dataclass(frozen=True)
class RampStage:
    """From `tokens` trained tokens on, a step has `samples` samples."""

    tokens: int
    samples: int


def parse_ramp(text: str) -> tuple[RampStage, ...]:
    """Parse `0:512 2B:1024` to stages, in the order written (a rule checks the order); raises RampError.

    Entries are separated by commas or blanks. A threshold is a number of tokens, with K, M, B or T for thousands,
    millions, billions or trillions.
    """
    entries = text.replace(",", " ").split()
    if not entries:
        raise RampError("is empty: write TOKENS:SAMPLES, starting at 0, as in '0:512 2B:1024'")
    return tuple(_stage(entry) for entry in entries)


def format_rampup(stages: Iterable[RampStage]) -> str:
    """Return the text of stages, without blanks: `0:512,2B:1024`."""
    return ",".join(f"{_short(stage.tokens)}:{stage.samples}" for stage in stages)


def get_rampup(spec: RunSpec) -> tuple[RampStage, ...]:
    """Return the stages of a run's batch size, one without a rampup; raises RampError if it cannot be parsed."""
    batch = spec.batch
    if batch.rampup_batch_size is None:
        return (RampStage(0, batch.global_batch_size),)
    return parse_rampup(batch.rampup_batch_size, batch.global_batch_size, batch.sequence_length)


@lru_cache(maxsize=256)
def parse_rampup(text: str, global_batch_size: int, sequence_length: int) -> tuple[RampStage, ...]:
    """Return the stages of a rampup in either form (`parse_increments`, `parse_ramp`); raises RampError."""
    return parse_increments(text, global_batch_size, sequence_length) or parse_ramp(text)


def parse_increments(text: str, global_batch_size: int, sequence_length: int) -> tuple[RampStage, ...] | None:
    """Parse Megatron-LM's `START INCREMENT SAMPLES`; None for another text, raises RampError for impossible numbers.

    As in `RampupBatchsizeNumMicroBatchesCalculator` of megatron-core, the batch grows from START by INCREMENT, n times
    up to `global_batch_size`, each time after SAMPLES / n further samples.
    """
    match = _INCREMENTS.fullmatch(text)
    if match is None:
        return None
    start, increment, ramp = (int(number) for number in match.groups())
    growth = global_batch_size - start
    if 0 in (start, increment) or growth < 0 or growth % increment:
        raise RampError(
            f"{text.strip()!r} does not lead from {start} in increments of {increment} to global_batch_size "
            f"{global_batch_size}: write START INCREMENT SAMPLES, global_batch_size = START + n x INCREMENT"
        )
    count = growth // increment
    if count > _MOST_STAGES:
        raise RampError(f"{text.strip()!r} has {count} increments, more than {_MOST_STAGES}: give a larger increment")
    begins = ((number, -(-number * ramp // count) if number else 0) for number in range(count + 1))
    return tuple(RampStage(first * sequence_length, start + number * increment) for number, first in begins)


def batch_gcd(spec: RunSpec) -> int:
    """Return the greatest common divisor of the batch sizes of all steps.

    A rampup that cannot be parsed counts as none; a rule reports it.
    """
    return math.gcd(spec.batch.global_batch_size, *(stage.samples for stage in _stages(spec)))


def batch_at(spec: RunSpec, consumed: int) -> int:
    """Return the samples of the step that starts after `consumed` samples, as Megatron-LM's step schedule counts.

    A stage applies from the first step that starts at or after its threshold; raises RampError.
    """
    samples = 0
    for stage in get_rampup(spec):
        if samples == 0 or stage.tokens // spec.batch.sequence_length <= consumed:
            samples = stage.samples
    return samples


def samples_after(spec: RunSpec, steps: int) -> int:
    """Return the samples of the first `steps` steps, in closed form for each stage of a rampup.

    A rampup that cannot be parsed counts as none; a rule reports it.
    """
    consumed = 0
    for stage_steps, samples in _steps_per_stage(_stages(spec), spec.batch.sequence_length, steps):
        consumed += stage_steps * samples
    return consumed


def samples_of_step(spec: RunSpec, step: int) -> range:
    """Return the samples of a step (from 1), as positions in the training order."""
    return range(samples_after(spec, step - 1), samples_after(spec, step))


def schedule_position(spec: RunSpec, step: int) -> float:
    """Return the position of a step in the learning rate schedule, in steps of the final batch size.

    The schedule counts samples, as in Megatron-LM: a step of half the final batch advances it by half a step. Without
    a rampup it is the step's number.
    """
    if spec.batch.rampup_batch_size is None:
        return step
    return samples_after(spec, step) / spec.batch.global_batch_size


def mean_batch_share(spec: RunSpec, first: int, last: int) -> float:
    """Return the mean batch size of the steps `first` to `last` (from 1), as a share of the final batch size."""
    if spec.batch.rampup_batch_size is None or first > last:
        return 1.0
    samples = samples_after(spec, last) - samples_after(spec, first - 1)
    return samples / ((last - first + 1) * spec.batch.global_batch_size)


def steps_per_stage(spec: RunSpec) -> tuple[int, ...]:
    """Return the steps of the run in each stage of its rampup (0: never reached); raises RampError."""
    by_stage = _steps_per_stage(get_rampup(spec), spec.batch.sequence_length, spec.train.steps)
    return tuple(steps for steps, _ in by_stage)


def tokens_per_step(spec: RunSpec) -> int:
    """Return the tokens of one optimizer step over all devices, with the final batch size of a rampup."""
    return spec.batch.global_batch_size * spec.batch.sequence_length


def samples_requested(spec: RunSpec) -> int:
    """Return the training samples of the run: train.steps * batch.global_batch_size, fewer with a rampup."""
    return samples_after(spec, spec.train.steps)


def steps_by_size(spec: RunSpec, tokens: float) -> Iterator[tuple[float, int]]:
    """Yield (steps, samples per step) of each batch size until `tokens` are trained; the last step may be partial."""
    length = spec.batch.sequence_length
    return _steps_for(tokens / length, _stages(spec), length)


def steps_for_samples(samples: int, stages: tuple[RampStage, ...], sequence_length: int) -> float:
    """Return the steps that train so many samples through the stages of a rampup; the last step may be partial."""
    return sum(steps for steps, _ in _steps_for(samples, stages, sequence_length))


def tokens_requested(spec: RunSpec) -> int:
    """Return the tokens of the run."""
    return samples_requested(spec) * spec.batch.sequence_length


def _stage(entry: str) -> RampStage:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise RampError(f"{entry[:40]!r} is not TOKENS:SAMPLES (as in '0:512' or '2.5B:1024')")
    number, suffix, samples = match.groups()
    if int(samples) == 0:
        raise RampError(f"{entry!r} has 0 samples")
    integer, _, fraction = number.partition(".")
    scale = _SCALES[suffix.upper()]  # in integers: a float would round thresholds
    tokens, rest = divmod(int(integer + fraction) * scale, 10 ** len(fraction))
    if rest:
        raise RampError(f"{entry!r} is not an integer number of tokens")
    return RampStage(tokens, int(samples))


def _short(tokens: int) -> str:
    for suffix, scale in reversed(_SCALES.items()):
        if tokens and tokens % scale == 0:
            return f"{tokens // scale}{suffix}"
    return "0"


def _stages(spec: RunSpec) -> tuple[RampStage, ...]:
    try:
        return get_rampup(spec)
    except RampError:
        return (RampStage(0, spec.batch.global_batch_size),)


def _steps_for(samples: float, stages: tuple[RampStage, ...], sequence_length: int) -> Iterator[tuple[float, int]]:
    left = samples
    for steps, size in _steps_per_stage(stages, sequence_length, _UNLIMITED):
        taken = min(float(steps), left / size)
        left -= taken * size
        yield taken, size


def _steps_per_stage(stages: tuple[RampStage, ...], sequence_length: int, steps: int) -> Iterator[tuple[int, int]]:
    """Yield (steps, samples per step) of each stage, within `steps` steps."""
    consumed, left = 0, steps
    ends: list[int | None] = [stage.tokens // sequence_length for stage in stages[1:]]
    for stage, end in zip(stages, [*ends, None], strict=True):
        taken = left if end is None else min(left, max(0, -(-(end - consumed) // stage.samples)))
        consumed, left = consumed + taken * stage.samples, left - taken
        yield taken, stage.samples
