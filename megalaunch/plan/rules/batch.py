"""Rules of the batch, global = micro x dp x microbatches, and of batch size rampup."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from megalaunch.plan.batch import RampError, RampStage, batch_gcd, format_rampup, get_rampup, steps_per_stage
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest


@rule("batch.global_by_dp", "A step is a whole number of microbatches on every data-parallel rank.")
def global_by_dp(at: RuleContext) -> Iterator[Violation]:
    """No sample is dropped, and none is computed twice."""
    batch, dp = at.spec.batch, at.dp
    if dp is None:
        return
    whole, micro = batch.global_batch_size, batch.micro_batch_size
    step = dp * (micro or 1)
    if whole % step == 0:
        return
    fixes: list[Fix] = []
    if micro is not None and whole % dp == 0:
        fixes += nearest("batch.micro_batch_size", micro, lambda n: n < micro and whole // dp % n == 0, 1)
    divided = f"micro_batch_size {micro} x dp {dp} = {step}" if micro is not None else f"dp {dp}"
    yield Violation(
        "batch.global_batch_size",
        f"global_batch_size {whole} does not divide by {divided}",
        {"global_batch_size": whole, "micro_batch_size": micro, "dp": dp},
        (
            *fixes,
            *multiples("batch.global_batch_size", whole, step),
            *nearest("parallel.dp", dp, lambda n: whole % (n * (micro or 1)) == 0),
        ),
    )


_NO_RAMP: Fix = {"batch.rampup_batch_size": None}


def _stages(at: RuleContext) -> tuple[RampStage, ...]:
    """The stages of a ramp that can be read; none without a ramp."""
    try:
        return get_rampup(at.spec) if at.spec.batch.rampup_batch_size is not None else ()
    except RampError:
        return ()


def _rewritten(stages: tuple[RampStage, ...] | list[RampStage]) -> Fix:
    return {"batch.rampup_batch_size": format_rampup(stages)}


@rule("batch.rampup_form", "A ramp is a list of TOKENS:SAMPLES.")
def rampup_form(at: RuleContext) -> Iterator[Violation]:
    """Thresholds are numbers of trained tokens, as in `0:512 2B:1024`."""
    try:
        get_rampup(at.spec)
    except RampError as error:
        yield Violation("batch.rampup_batch_size", f"batch.rampup_batch_size {error}", fixes=(_NO_RAMP,))


@rule("batch.rampup_start", "A ramp says which batch the first step has.")
def rampup_start(at: RuleContext) -> Iterator[Violation]:
    """Its first threshold is 0."""
    stages = _stages(at)
    if stages and stages[0].tokens != 0:
        first = RampStage(0, stages[0].samples)
        yield Violation(
            "batch.rampup_batch_size",
            f"the ramp begins at {stages[0].tokens} tokens, and the first step starts at 0",
            {"first_threshold": stages[0].tokens},
            (_rewritten([first, *stages[1:]]), _NO_RAMP),
        )


@rule("batch.rampup_thresholds", "The thresholds of a ramp rise.")
def rampup_thresholds(at: RuleContext) -> Iterator[Violation]:
    """Of two entries at one threshold the first would never be used."""
    stages = _stages(at)
    for before, after in pairwise(stages):
        if after.tokens <= before.tokens:
            ordered = {stage.tokens: stage for stage in sorted(stages, key=lambda s: (s.tokens, s.samples))}
            yield Violation(
                "batch.rampup_batch_size",
                f"the threshold {after.tokens} comes after {before.tokens}",
                {"threshold": after.tokens, "before": before.tokens},
                (_rewritten(list(ordered.values())), _NO_RAMP),
            )
            return


@rule("batch.rampup_sizes", "The batches of a ramp grow.")
def rampup_sizes(at: RuleContext) -> Iterator[Violation]:
    """Fewer samples a step later in a run are a slip of the pen; Megatron's trainer stops when it meets them."""
    for before, after in pairwise(_stages(at)):
        if after.samples < before.samples:
            yield Violation(
                "batch.rampup_batch_size",
                f"the batch falls from {before.samples} to {after.samples} samples at {after.tokens} tokens",
                {"samples": after.samples, "before": before.samples, "threshold": after.tokens},
                (_rewritten(_growing(_stages(at))), _NO_RAMP),
            )
            return


def _growing(stages: tuple[RampStage, ...]) -> list[RampStage]:
    kept: list[RampStage] = []
    for stage in stages:
        if not kept or stage.samples > kept[-1].samples:
            kept.append(stage)
    return kept


@rule("batch.rampup_end", "A ramp ends at global_batch_size.")
def rampup_end(at: RuleContext) -> Iterator[Violation]:
    """What is planned, and what is reported, is the full batch."""
    stages, whole = _stages(at), at.spec.batch.global_batch_size
    if stages and stages[-1].samples != whole:
        last = RampStage(stages[-1].tokens, whole)
        yield Violation(
            "batch.rampup_batch_size",
            f"the ramp ends at {stages[-1].samples} samples, and global_batch_size is {whole}",
            {"last": stages[-1].samples, "global_batch_size": whole},
            ({"batch.global_batch_size": stages[-1].samples}, _rewritten([*stages[:-1], last]), _NO_RAMP),
        )


@rule("batch.rampup_by_dp", "Every batch of a ramp is a whole number of microbatches on every data-parallel rank.")
def rampup_by_dp(at: RuleContext) -> Iterator[Violation]:
    """Megatron checks a later stage only when the run reaches it, days after the start."""
    micro, dp = at.spec.batch.micro_batch_size, at.dp
    if dp is None:
        return
    step, unit = dp * (micro or 1), batch_gcd(at.spec)
    wrong = [stage for stage in _stages(at)[:-1] if stage.samples % step]
    if wrong:
        stages = _stages(at)
        rounded = [RampStage(s.tokens, max(step, s.samples // step * step)) for s in stages[:-1]] + [stages[-1]]
        divided = f"micro_batch_size {micro} x dp {dp} = {step}" if micro is not None else f"dp {dp}"
        smaller = nearest("batch.micro_batch_size", micro or 1, lambda n: n < (micro or 1) and unit % (dp * n) == 0, 1)
        yield Violation(
            "batch.rampup_batch_size",
            f"the batch of {wrong[0].samples} samples at {wrong[0].tokens} tokens does not divide by {divided}",
            {"samples": wrong[0].samples, "micro_batch_size": micro, "dp": dp},
            (*smaller, _rewritten(rounded), _NO_RAMP),
        )


@rule("batch.rampup_used", "Every batch of a ramp is the batch of some step.")
def rampup_used(at: RuleContext) -> Iterator[Violation]:
    """A threshold that is passed within one step, or that lies behind the last, changes nothing."""
    stages = _stages(at)
    if not stages or any(after.tokens <= before.tokens for before, after in pairwise(stages)):
        return
    steps = steps_per_stage(at.spec)
    unused = [stage for stage, count in zip(stages, steps, strict=True) if count == 0]
    if unused:
        kept = [stage for stage, count in zip(stages, steps, strict=True) if count]
        ended = unused[-1] is stages[-1]
        why = f"the run of {at.spec.train.steps} steps ends before" if ended else "the next one begins within a step"
        yield Violation(
            "batch.rampup_batch_size",
            f"the batch of {unused[0].samples} samples at {unused[0].tokens} tokens is never used: {why}",
            {"samples": unused[0].samples, "threshold": unused[0].tokens, "steps": at.spec.train.steps},
            (_rewritten([RampStage(0, kept[0].samples), *kept[1:]]), _NO_RAMP),
            severity="warning",
        )
