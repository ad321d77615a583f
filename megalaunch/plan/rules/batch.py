"""Rules of the batch, global = micro x dp x microbatches, and of batch size rampup."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megalaunch.plan.batch import RampError, RampStage, batch_gcd, format_rampup, get_rampup, steps_per_stage
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest, other_clusters


@rule("batch.global_by_dp", "global_batch_size is divisible by micro_batch_size x dp.")
def global_by_dp(at: RuleContext) -> Iterator[Violation]:
    """Every data-parallel rank runs the same number of microbatches; no sample is dropped or repeated."""
    batch, dp = at.spec.batch, at.dp
    if dp is None:
        return
    global_batch, micro = batch.global_batch_size, batch.micro_batch_size
    step = dp * (micro or 1)
    if global_batch % step == 0:
        return
    fixes: list[Fix] = []
    if micro is not None and global_batch % dp == 0:
        fixes += nearest("batch.micro_batch_size", micro, lambda n: n < micro and global_batch // dp % n == 0, 1)
    divisor = f"micro_batch_size {micro} x dp {dp} = {step}" if micro is not None else f"dp {dp}"
    yield Violation(
        "batch.global_batch_size",
        f"global_batch_size {global_batch} is not divisible by {divisor}",
        {"global_batch_size": global_batch, "micro_batch_size": micro, "dp": dp},
        (
            *fixes,
            *multiples("batch.global_batch_size", global_batch, step),
            *other_clusters(at),
            *nearest("parallel.dp", dp, lambda n: global_batch % (n * (micro or 1)) == 0),
        ),
    )


_NO_RAMP: Fix = {"batch.rampup_batch_size": None}
_MOST_WRITTEN = 8


def _stages(at: RuleContext) -> tuple[RampStage, ...]:
    """Return the stages of a valid rampup; none without a rampup."""
    try:
        return get_rampup(at.spec) if at.spec.batch.rampup_batch_size is not None else ()
    except RampError:
        return ()


def _rewritten(stages: tuple[RampStage, ...] | list[RampStage]) -> Iterator[Fix]:
    """Yield the fix that writes these stages; none for so many that nobody would write them."""
    if len(stages) <= _MOST_WRITTEN:
        yield {"batch.rampup_batch_size": format_rampup(stages)}


@rule("batch.rampup_form", "A batch size rampup is a list of TOKENS:SAMPLES, or START INCREMENT SAMPLES.")
def rampup_form(at: RuleContext) -> Iterator[Violation]:
    """Thresholds are trained tokens, as in `0:512 2B:1024`."""
    try:
        get_rampup(at.spec)
    except RampError as error:
        yield Violation("batch.rampup_batch_size", f"batch.rampup_batch_size {error}", fixes=(_NO_RAMP,))


@rule("batch.rampup_start", "The first threshold of a rampup is 0.")
def rampup_start(at: RuleContext) -> Iterator[Violation]:
    """It gives the batch size of the first step."""
    stages = _stages(at)
    if stages and stages[0].tokens != 0:
        first = RampStage(0, stages[0].samples)
        yield Violation(
            "batch.rampup_batch_size",
            f"the rampup starts at {stages[0].tokens} tokens, but the first step is at 0",
            {"first_threshold": stages[0].tokens},
            (*_rewritten([first, *stages[1:]]), _NO_RAMP),
        )


@rule("batch.rampup_thresholds", "The thresholds of a rampup increase.")
def rampup_thresholds(at: RuleContext) -> Iterator[Violation]:
    """Of two entries with one threshold the first would never apply."""
    stages = _stages(at)
    for before, after in pairwise(stages):
        if after.tokens <= before.tokens:
            ordered = {stage.tokens: stage for stage in sorted(stages, key=lambda s: (s.tokens, s.samples))}
            yield Violation(
                "batch.rampup_batch_size",
                f"threshold {after.tokens} follows {before.tokens}",
                {"threshold": after.tokens, "before": before.tokens},
                (*_rewritten(list(ordered.values())), _NO_RAMP),
            )
            return


@rule("batch.rampup_sizes", "The batch sizes of a rampup increase.")
def rampup_sizes(at: RuleContext) -> Iterator[Violation]:
    """A smaller batch later in the run is most likely a mistake; Megatron-LM stops when it reaches one."""
    for before, after in pairwise(_stages(at)):
        if after.samples < before.samples:
            yield Violation(
                "batch.rampup_batch_size",
                f"the batch size decreases from {before.samples} to {after.samples} samples at {after.tokens} tokens",
                {"samples": after.samples, "before": before.samples, "threshold": after.tokens},
                (*_rewritten(_increasing(_stages(at))), _NO_RAMP),
            )
            return


def _increasing(stages: tuple[RampStage, ...]) -> list[RampStage]:
    increasing: list[RampStage] = []
    for stage in stages:
        if not increasing or stage.samples > increasing[-1].samples:
            increasing.append(stage)
    return increasing


@rule("batch.rampup_end", "A rampup ends at global_batch_size.")
def rampup_end(at: RuleContext) -> Iterator[Violation]:
    """Plans and reports are for the full batch."""
    stages, global_batch = _stages(at), at.spec.batch.global_batch_size
    if stages and stages[-1].samples != global_batch:
        last = RampStage(stages[-1].tokens, global_batch)
        yield Violation(
            "batch.rampup_batch_size",
            f"the rampup ends at {stages[-1].samples} samples, but global_batch_size is {global_batch}",
            {"last": stages[-1].samples, "global_batch_size": global_batch},
            ({"batch.global_batch_size": stages[-1].samples}, *_rewritten([*stages[:-1], last]), _NO_RAMP),
        )


@rule("batch.rampup_by_dp", "Every batch of a rampup is divisible by micro_batch_size x dp.")
def rampup_by_dp(at: RuleContext) -> Iterator[Violation]:
    """Megatron-LM checks a later stage only when the run reaches it, days after the start."""
    micro, dp = at.spec.batch.micro_batch_size, at.dp
    if dp is None:
        return
    step, unit = dp * (micro or 1), batch_gcd(at.spec)
    wrong = [stage for stage in _stages(at)[:-1] if stage.samples % step]
    if wrong:
        stages = _stages(at)
        rounded = _increasing(
            (*(RampStage(s.tokens, max(step, s.samples // step * step)) for s in stages[:-1]), stages[-1])
        )
        divisor = f"micro_batch_size {micro} x dp {dp} = {step}" if micro is not None else f"dp {dp}"
        smaller = nearest("batch.micro_batch_size", micro or 1, lambda n: n < (micro or 1) and unit % (dp * n) == 0, 1)
        yield Violation(
            "batch.rampup_batch_size",
            f"the batch of {wrong[0].samples} samples at {wrong[0].tokens} tokens is not divisible by {divisor}",
            {"samples": wrong[0].samples, "micro_batch_size": micro, "dp": dp},
            (*smaller, *_rewritten(rounded), _NO_RAMP),
        )


@rule("batch.rampup_used", "Every batch of a rampup is used by some step.")
def rampup_used(at: RuleContext) -> Iterator[Violation]:
    """A threshold that is passed within one step, or that comes after the last step, changes nothing."""
    stages = _stages(at)
    if not stages or any(after.tokens <= before.tokens for before, after in pairwise(stages)):
        return
    steps = steps_per_stage(at.spec)
    unused = [stage for stage, count in zip(stages, steps, strict=True) if count == 0]
    if unused:
        used = [stage for stage, count in zip(stages, steps, strict=True) if count]
        ended = unused[-1] is stages[-1]
        why = (
            f"the run of {at.spec.train.steps} steps ends before"
            if ended
            else "the next threshold is within the same step"
        )
        yield Violation(
            "batch.rampup_batch_size",
            f"the batch of {unused[0].samples} samples at {unused[0].tokens} tokens is never used: {why}",
            {"samples": unused[0].samples, "threshold": unused[0].tokens, "steps": at.spec.train.steps},
            (*_rewritten([RampStage(0, used[0].samples), *used[1:]]), _NO_RAMP),
            severity="warning",
        )
