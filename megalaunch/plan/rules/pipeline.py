"""Rules of pipeline schedules: microbatches, their groups, overlap of send/recv."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.batch import RampError, get_rampup
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest
from megalaunch.plan.stage_validation import V_SCHEDULES
from megalaunch.plan.world import num_microbatches

_ONE_CHUNK = ("gpipe", "1f1b")


@rule("parallel.schedule_needs_pp", "parallel.schedule is set only with pp above 1.")
def schedule_needs_pp(at: RuleContext) -> Iterator[Violation]:
    """With pp 1 there is no pipeline to schedule, so the setting has no effect."""
    p = at.spec.parallel
    if p.pp == 1 and p.schedule != "auto":
        yield Violation(
            "parallel.schedule",
            f"schedule={p.schedule} has no effect: pp is 1",
            {"pp": 1},
            ({"parallel.schedule": "auto"},),
            "warning",
        )


@rule("parallel.interleaved_needs_vpp", "The interleaved schedule has vpp above 1.")
def interleaved_needs_vpp(at: RuleContext) -> Iterator[Violation]:
    """With one stage per rank it equals 1F1B."""
    p = at.spec.parallel
    if p.schedule == "interleaved" and p.pp > 1 and at.chunks == 1:
        yield Violation(
            "parallel.schedule",
            "schedule=interleaved needs more than one stage per rank, but vpp is 1",
            {"vpp": 1},
            ({"parallel.schedule": "1f1b"}, {"parallel.vpp": 2}, {"parallel.schedule": "auto"}),
        )


@rule("parallel.one_stage_schedule", "The gpipe and 1f1b schedules have one stage per rank.")
def one_stage_schedule(at: RuleContext) -> Iterator[Violation]:
    """A microbatch passes through every rank once."""
    p = at.spec.parallel
    if p.schedule in _ONE_CHUNK and p.pp > 1 and at.chunks > 1:
        yield Violation(
            "parallel.schedule",
            f"schedule={p.schedule} needs one stage per rank, but there are {at.chunks}",
            {"vpp": at.chunks},
            ({"parallel.schedule": "interleaved"}, {"parallel.vpp": None}),
        )


@rule("parallel.v_schedule", "The zbv and dualpipev schedules have exactly two stages per rank.")
def v_schedule(at: RuleContext) -> Iterator[Violation]:
    """A microbatch passes through the first stages in rank order, then through the second stages in reverse order."""
    p = at.spec.parallel
    if p.schedule in V_SCHEDULES and p.pp > 1 and at.chunks != 2:
        yield Violation(
            "parallel.vpp",
            f"schedule={p.schedule} needs exactly two stages per rank, but there "
            f"{'is 1' if at.chunks == 1 else f'are {at.chunks}'}",
            {"vpp": at.chunks},
            ({"parallel.vpp": 2}, {"parallel.schedule": "auto"}),
        )


@rule("parallel.enough_microbatches", "The 1f1b and dualpipev schedules have at least as many microbatches as stages.")
def enough_microbatches(at: RuleContext) -> Iterator[Violation]:
    """Their warm-up runs a forward pass on every stage before the first backward pass."""
    p, count = at.spec.parallel, at.microbatches
    stages = p.pp * at.chunks
    if p.pp > 1 and count is not None and p.schedule in ("1f1b", "dualpipev") and count < stages:
        yield Violation(
            "batch.global_batch_size",
            f"{count} microbatches per rank and step, but {p.schedule} needs one for each of {stages} stages",
            {"microbatches": count, "stages": stages},
            (*_more_microbatches(at, stages), {"parallel.schedule": "gpipe"}),
        )


@rule("parallel.full_pipeline", "There are at least pp microbatches.")
def full_pipeline(at: RuleContext) -> Iterator[Violation]:
    """With fewer some rank is idle at any time."""
    p, count = at.spec.parallel, at.microbatches
    needed = p.schedule in ("1f1b", "dualpipev", "interleaved")  # these refuse it
    if p.pp > 1 and count is not None and count < p.pp and not needed:
        yield Violation(
            "batch.global_batch_size",
            f"{count} microbatches cannot fill a pipeline of pp {p.pp}",
            {"microbatches": count, "pp": p.pp},
            (*_more_microbatches(at, p.pp),),
            "warning",
        )


def _more_microbatches(at: RuleContext, count: int) -> Iterator[Fix]:
    """Yield fixes with at least `count` microbatches: smaller microbatches first, then a larger batch."""
    batch, dp = at.spec.batch, at.dp
    micro = batch.micro_batch_size
    if dp is None or micro is None:
        return
    share = batch.global_batch_size // dp
    yield from nearest(
        "batch.micro_batch_size", micro, lambda n: n < micro and share % n == 0 and share // n >= count, 1
    )
    yield {"batch.global_batch_size": count * micro * dp}
    yield from nearest("parallel.pp", at.spec.parallel.pp, lambda n: n < at.spec.parallel.pp, 3)


@rule("parallel.vpp_microbatches", "The number of microbatches of an interleaved schedule is divisible by pp.")
def vpp_microbatches(at: RuleContext) -> Iterator[Violation]:
    """Each rank runs pp microbatches of one chunk before those of the next chunk."""
    p, count = at.spec.parallel, at.microbatches
    if not _interleaved(at) or p.microbatch_group_size_per_vp_stage is not None or count is None or count % p.pp == 0:
        return
    yield Violation(
        "batch.global_batch_size",
        f"{count} microbatches are not divisible by pp {p.pp}, as vpp {at.chunks} requires",
        {"microbatches": count, "pp": p.pp, "vpp": at.chunks},
        (*_full_groups(at, p.pp), {"parallel.vpp": None}),
    )


@rule(
    "parallel.microbatch_group_bounds",
    "microbatch_group_size_per_vp_stage is at least pp, and at most the microbatches of a step.",
)
def microbatch_group_bounds(at: RuleContext) -> Iterator[Violation]:
    """In a smaller group the first rank would wait for its first microbatch to return; a larger group is never full."""
    p, count = at.spec.parallel, at.microbatches
    group = p.microbatch_group_size_per_vp_stage
    if group is None or not _interleaved(at) or (group >= p.pp and (count is None or group <= count)):
        return
    upper = f" and at most {count} microbatches" if count is not None else ""
    yield Violation(
        "parallel.microbatch_group_size_per_vp_stage",
        f"microbatch_group_size_per_vp_stage {group} must be at least pp {p.pp}{upper}",
        {"microbatch_group_size_per_vp_stage": group, "pp": p.pp, "microbatches": count},
        (
            *nearest("parallel.microbatch_group_size_per_vp_stage", group, lambda n: p.pp <= n <= (count or n), 2),
            {"parallel.microbatch_group_size_per_vp_stage": None},
            {"parallel.vpp": None, "parallel.microbatch_group_size_per_vp_stage": None},
        ),
    )


@rule("parallel.microbatch_group_rest", "The last group of microbatches is full, or has at least pp microbatches.")
def microbatch_group_rest(at: RuleContext) -> Iterator[Violation]:
    """A partial last group must still fill the pipeline."""
    p, count = at.spec.parallel, at.microbatches
    group = p.microbatch_group_size_per_vp_stage
    if group is None or count is None or not _interleaved(at) or not p.pp <= group <= count:
        return
    rest = count % group
    if 0 < rest < p.pp:
        yield Violation(
            "parallel.microbatch_group_size_per_vp_stage",
            f"{count} microbatches in groups of {group} leave a last group of {rest}, below pp {p.pp}",
            {"microbatches": count, "microbatch_group_size_per_vp_stage": group, "rest": rest, "pp": p.pp},
            (
                *nearest(
                    "parallel.microbatch_group_size_per_vp_stage",
                    group,
                    lambda n: p.pp <= n <= count and (count % n == 0 or count % n >= p.pp),
                ),
                *_full_groups(at, group),
            ),
        )


@rule(
    "parallel.microbatch_group_needs_vpp", "microbatch_group_size_per_vp_stage is set only for an interleaved schedule."
)
def microbatch_group_needs_vpp(at: RuleContext) -> Iterator[Violation]:
    """Other schedules have no groups, so the setting has no effect."""
    p = at.spec.parallel
    if p.microbatch_group_size_per_vp_stage is not None and not _interleaved(at):
        yield Violation(
            "parallel.microbatch_group_size_per_vp_stage",
            f"microbatch_group_size_per_vp_stage {p.microbatch_group_size_per_vp_stage} has no effect: "
            "the schedule is not interleaved",
            {"microbatch_group_size_per_vp_stage": p.microbatch_group_size_per_vp_stage},
            ({"parallel.microbatch_group_size_per_vp_stage": None}, {"parallel.vpp": 2}),
            "warning",
        )


@rule(
    "parallel.zero_bubble_rounds", "The number of microbatches of the zero_bubble schedule is divisible by its rounds."
)
def zero_bubble_rounds(at: RuleContext) -> Iterator[Violation]:
    """There are microbatches // pp rounds, with equally many microbatches each."""
    p, count = at.spec.parallel, at.microbatches
    if p.schedule != "zero_bubble" or p.pp == 1 or count is None:
        return
    rounds = max(1, count // p.pp)
    if count % rounds:
        yield Violation(
            "batch.global_batch_size",
            f"{count} microbatches are not divisible by {rounds} rounds ({count} // pp {p.pp})",
            {"microbatches": count, "rounds": rounds, "pp": p.pp},
            (*_full_groups(at, p.pp), {"parallel.schedule": "auto"}),
        )


@rule("parallel.rampup_by_schedule", "Every batch of a rampup has enough microbatches for the pipeline schedule.")
def rampup_by_schedule(at: RuleContext) -> Iterator[Violation]:
    """Otherwise the run fails at the first step of such a batch."""
    p, batch, dp = at.spec.parallel, at.spec.batch, at.dp
    if batch.rampup_batch_size is None or p.pp == 1 or dp is None or batch.micro_batch_size is None:
        return
    try:
        stages = get_rampup(at.spec)
    except RampError:  # batch.rampup_form says why
        return
    for stage in stages:
        count = num_microbatches(stage.samples, batch.micro_batch_size, dp)
        reason = _unfit(at, count) if count is not None and stage.samples != batch.global_batch_size else ""
        if reason:
            yield Violation(
                "batch.rampup_batch_size",
                f"the rampup's batch of {stage.samples} samples has {count} microbatches: {reason}",
                {"samples": stage.samples, "microbatches": count, "pp": p.pp, "vpp": at.chunks},
                ({"batch.rampup_batch_size": None}, {"parallel.vpp": None}, {"parallel.schedule": "gpipe"}),
            )
            return


def _unfit(at: RuleContext, count: int) -> str:
    """Return why a schedule cannot run a step of `count` microbatches; empty if it can."""
    p = at.spec.parallel
    stages, group = p.pp * at.chunks, p.microbatch_group_size_per_vp_stage or p.pp
    if p.schedule in ("1f1b", "dualpipev") and count < stages:
        return f"{p.schedule} needs one for each of {stages} stages"
    if p.schedule == "zero_bubble" and count % max(1, count // p.pp):
        return f"they are not divisible by {count // p.pp} rounds"
    if _interleaved(at) and (count < group or 0 < count % group < p.pp):
        return f"they are not divisible into groups of {group}"
    return ""


@rule("parallel.overlap_p2p_needs_vpp", "overlap_p2p_comm is on only with virtual stages.")
def overlap_p2p_needs_vpp(at: RuleContext) -> Iterator[Violation]:
    """It overlaps the send/recv of one chunk with compute of another; one stage per rank has no other chunk."""
    p = at.spec.parallel
    if p.overlap_p2p_comm and (p.pp == 1 or at.chunks == 1):
        why = "pp is 1" if p.pp == 1 else "there is one stage per rank"
        yield Violation(
            "parallel.overlap_p2p_comm",
            f"overlap_p2p_comm overlaps the send/recv of one chunk with compute of another, but {why}",
            {"pp": p.pp, "vpp": at.chunks},
            ({"parallel.overlap_p2p_comm": False}, {"parallel.vpp": 2}),
        )


def _interleaved(at: RuleContext) -> bool:
    p = at.spec.parallel
    return p.pp > 1 and at.chunks > 1 and p.schedule in ("auto", "interleaved")


def _full_groups(at: RuleContext, group: int) -> Iterator[Fix]:
    batch, dp = at.spec.batch, at.dp
    if dp is not None and batch.micro_batch_size is not None:
        yield from multiples("batch.global_batch_size", batch.global_batch_size, batch.micro_batch_size * dp * group)
