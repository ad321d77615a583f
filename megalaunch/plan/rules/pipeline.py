"""Rules of the order in which microbatches pass a pipeline: schedules, groups, overlap, bubble."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.batch import RampError, get_rampup
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest
from megalaunch.plan.stage_validation import V_SCHEDULES
from megalaunch.plan.world import num_microbatches

_ONE_CHUNK = ("gpipe", "1f1b")


@rule("parallel.schedule_needs_pp", "An order of microbatches is chosen for a pipeline.")
def schedule_needs_pp(at: RuleContext) -> Iterator[Violation]:
    """With pp 1 microbatches follow each other, and the choice has no effect."""
    p = at.spec.parallel
    if p.pp == 1 and p.schedule != "auto":
        yield Violation(
            "parallel.schedule",
            f"schedule={p.schedule} has no effect: pp is 1",
            {"pp": 1},
            ({"parallel.schedule": "auto"},),
            "warning",
        )


@rule("parallel.interleaved_needs_vpp", "The interleaved schedule has virtual stages to interleave.")
def interleaved_needs_vpp(at: RuleContext) -> Iterator[Violation]:
    """With one stage a rank it would be 1f1b."""
    p = at.spec.parallel
    if p.schedule == "interleaved" and p.pp > 1 and at.chunks == 1:
        yield Violation(
            "parallel.schedule",
            "schedule=interleaved needs more than one stage a rank, and vpp is 1",
            {"vpp": 1},
            ({"parallel.schedule": "1f1b"}, {"parallel.vpp": 2}, {"parallel.schedule": "auto"}),
        )


@rule("parallel.one_stage_schedule", "The schedules gpipe and 1f1b have one stage a rank.")
def one_stage_schedule(at: RuleContext) -> Iterator[Violation]:
    """They pass a microbatch through every rank once."""
    p = at.spec.parallel
    if p.schedule in _ONE_CHUNK and p.pp > 1 and at.chunks > 1:
        yield Violation(
            "parallel.schedule",
            f"schedule={p.schedule} has one stage a rank, and this division has {at.chunks}",
            {"vpp": at.chunks},
            ({"parallel.schedule": "interleaved"}, {"parallel.vpp": None}),
        )


@rule("parallel.v_schedule", "The schedules zbv and dualpipev have exactly two stages a rank.")
def v_schedule(at: RuleContext) -> Iterator[Violation]:
    """A microbatch goes down the ranks through the first stages, and back up through the second."""
    p = at.spec.parallel
    if p.schedule in V_SCHEDULES and p.pp > 1 and at.chunks != 2:
        yield Violation(
            "parallel.vpp",
            f"schedule={p.schedule} needs exactly two stages a rank, and there "
            f"{'is 1' if at.chunks == 1 else f'are {at.chunks}'}",
            {"vpp": at.chunks},
            ({"parallel.vpp": 2}, {"parallel.schedule": "auto"}),
        )


@rule("parallel.enough_microbatches", "There are at least as many microbatches as stages for 1f1b and dualpipev.")
def enough_microbatches(at: RuleContext) -> Iterator[Violation]:
    """Their warm-up fills every stage once before anything goes back."""
    p, count = at.spec.parallel, at.microbatches
    stages = p.pp * at.chunks
    if p.pp > 1 and count is not None and p.schedule in ("1f1b", "dualpipev") and count < stages:
        yield Violation(
            "batch.global_batch_size",
            f"{count} microbatches of a rank and step are fewer than {stages} stages, which {p.schedule} needs",
            {"microbatches": count, "stages": stages},
            (*_more_microbatches(at, stages), {"parallel.schedule": "gpipe"}),
        )


@rule("parallel.full_pipeline", "A pipeline is full for some of the time: microbatches are no fewer than pp.")
def full_pipeline(at: RuleContext) -> Iterator[Violation]:
    """Otherwise some rank idles at every moment."""
    p, count = at.spec.parallel, at.microbatches
    needed = p.schedule in ("1f1b", "dualpipev", "interleaved")  # these refuse it
    if p.pp > 1 and count is not None and count < p.pp and not needed:
        yield Violation(
            "batch.global_batch_size",
            f"{count} microbatches never fill a pipeline of pp {p.pp}",
            {"microbatches": count, "pp": p.pp},
            (*_more_microbatches(at, p.pp),),
            "warning",
        )


def _more_microbatches(at: RuleContext, count: int) -> Iterator[Fix]:
    """Smaller microbatches first, then a larger batch."""
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


@rule("parallel.vpp_microbatches", "Interleaved stages take microbatches in whole groups of pp.")
def vpp_microbatches(at: RuleContext) -> Iterator[Violation]:
    """Each rank runs pp microbatches of one chunk before those of the next chunk."""
    p, count = at.spec.parallel, at.microbatches
    if not _interleaved(at) or p.microbatch_group_size_per_vp_stage is not None or count is None or count % p.pp == 0:
        return
    yield Violation(
        "batch.global_batch_size",
        f"{count} microbatches do not divide into groups of pp {p.pp}, which vpp {at.chunks} needs",
        {"microbatches": count, "pp": p.pp, "vpp": at.chunks},
        (*_whole_groups(at, p.pp), {"parallel.vpp": None}),
    )


@rule("parallel.microbatch_group_bounds", "A group of microbatches is no smaller than pp and no larger than the step.")
def microbatch_group_bounds(at: RuleContext) -> Iterator[Violation]:
    """A smaller group would wait for its own first microbatch; a larger one would never be whole."""
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


@rule("parallel.microbatch_group_rest", "The last group of microbatches is whole, or no smaller than pp.")
def microbatch_group_rest(at: RuleContext) -> Iterator[Violation]:
    """A ragged last group must still fill the pipeline."""
    p, count = at.spec.parallel, at.microbatches
    group = p.microbatch_group_size_per_vp_stage
    if group is None or count is None or not _interleaved(at) or not p.pp <= group <= count:
        return
    rest = count % group
    if 0 < rest < p.pp:
        yield Violation(
            "parallel.microbatch_group_size_per_vp_stage",
            f"{count} microbatches in groups of {group} leave a last group of {rest}, smaller than pp {p.pp}",
            {"microbatches": count, "microbatch_group_size_per_vp_stage": group, "rest": rest, "pp": p.pp},
            (
                *nearest(
                    "parallel.microbatch_group_size_per_vp_stage",
                    group,
                    lambda n: p.pp <= n <= count and (count % n == 0 or count % n >= p.pp),
                ),
                *_whole_groups(at, group),
            ),
        )


@rule("parallel.microbatch_group_needs_vpp", "A group of microbatches is one of an interleaved schedule.")
def microbatch_group_needs_vpp(at: RuleContext) -> Iterator[Violation]:
    """Other schedules have no groups, and the setting has no effect."""
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


@rule("parallel.zero_bubble_rounds", "The zero-bubble schedule runs rounds of equally many microbatches.")
def zero_bubble_rounds(at: RuleContext) -> Iterator[Violation]:
    """There are microbatches // pp rounds, and none may be ragged."""
    p, count = at.spec.parallel, at.microbatches
    if p.schedule != "zero_bubble" or p.pp == 1 or count is None:
        return
    rounds = max(1, count // p.pp)
    if count % rounds:
        yield Violation(
            "batch.global_batch_size",
            f"{count} microbatches do not divide into {rounds} rounds ({count} // pp {p.pp})",
            {"microbatches": count, "rounds": rounds, "pp": p.pp},
            (*_whole_groups(at, p.pp), {"parallel.schedule": "auto"}),
        )


@rule("parallel.rampup_by_schedule", "Every batch of a ramp has as many microbatches as the pipeline's schedule needs.")
def rampup_by_schedule(at: RuleContext) -> Iterator[Violation]:
    """A run would fail at the step at which such a batch begins, or at its first one."""
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
                f"the ramp's batch of {stage.samples} has {count} microbatches: {reason}",
                {"samples": stage.samples, "microbatches": count, "pp": p.pp, "vpp": at.chunks},
                ({"batch.rampup_batch_size": None}, {"parallel.vpp": None}, {"parallel.schedule": "gpipe"}),
            )
            return


def _unfit(at: RuleContext, count: int) -> str:
    """Why a schedule cannot run a step of that many microbatches; empty when it can."""
    p = at.spec.parallel
    stages, group = p.pp * at.chunks, p.microbatch_group_size_per_vp_stage or p.pp
    if p.schedule in ("1f1b", "dualpipev") and count < stages:
        return f"{p.schedule} needs one for each of {stages} stages"
    if p.schedule == "zero_bubble" and count % max(1, count // p.pp):
        return f"they do not divide into {count // p.pp} rounds"
    if _interleaved(at) and (count < group or 0 < count % group < p.pp):
        return f"they do not fill groups of {group}"
    return ""


@rule("parallel.overlap_p2p_needs_vpp", "Sending beside computing is a part of the interleaved schedule.")
def overlap_p2p_needs_vpp(at: RuleContext) -> Iterator[Violation]:
    """With one stage a rank there is no other chunk to compute meanwhile."""
    p = at.spec.parallel
    if p.overlap_p2p_comm and (p.pp == 1 or at.chunks == 1):
        why = "pp is 1" if p.pp == 1 else "there is one stage a rank"
        yield Violation(
            "parallel.overlap_p2p_comm",
            f"overlap_p2p_comm sends a chunk while another one computes, and {why}",
            {"pp": p.pp, "vpp": at.chunks},
            ({"parallel.overlap_p2p_comm": False}, {"parallel.vpp": 2}),
        )


def _interleaved(at: RuleContext) -> bool:
    p = at.spec.parallel
    return p.pp > 1 and at.chunks > 1 and p.schedule in ("auto", "interleaved")


def _whole_groups(at: RuleContext, group: int) -> Iterator[Fix]:
    batch, dp = at.spec.batch, at.dp
    if dp is not None and batch.micro_batch_size is not None:
        yield from multiples("batch.global_batch_size", batch.global_batch_size, batch.micro_batch_size * dp * group)
