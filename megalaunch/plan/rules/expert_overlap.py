"""Rules of hiding expert exchanges behind another microbatch's compute (parallel.overlap_moe_expert_parallel_comm)."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule

_OFF: Fix = {"parallel.overlap_moe_expert_parallel_comm": False}


def _overlaps(at: RuleContext) -> bool:
    """True where the switch is on and there is something to hide."""
    return at.spec.parallel.overlap_moe_expert_parallel_comm and at.has_experts and at.spec.parallel.ep > 1


@rule("overlap_moe.all_to_all", "Expert exchanges are hidden where there are some.")
def all_to_all(at: RuleContext) -> Iterator[Violation]:
    """Tokens travel only with ep above 1."""
    if at.spec.parallel.overlap_moe_expert_parallel_comm and not _overlaps(at):
        why = f"ep is {at.spec.parallel.ep}" if at.has_experts else "the model is dense"
        yield Violation(
            "parallel.overlap_moe_expert_parallel_comm",
            f"overlap_moe_expert_parallel_comm=true has no effect: {why}",
            {"ep": at.spec.parallel.ep},
            (_OFF, {"parallel.ep": 2}),
            severity="warning",
        )


@rule("overlap_moe.dispatcher", "Exchanges that are hidden are between pairs of ranks.")
def dispatcher(at: RuleContext) -> Iterator[Violation]:
    """allgather brings all tokens at once, and has no second half to hide."""
    if _overlaps(at) and at.spec.parallel.moe_token_dispatcher_type == "allgather":
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            "overlap_moe_expert_parallel_comm needs moe_token_dispatcher_type=alltoall or flex, and it is allgather",
            fixes=({"parallel.moe_token_dispatcher_type": "alltoall"}, _OFF),
        )


@rule("overlap_moe.stages", "In a pipeline the other microbatch is on another virtual stage.")
def stages(at: RuleContext) -> Iterator[Violation]:
    """1f1b alternates one forward and one backward pass of the same layers; with vpp there are others to pair."""
    p = at.spec.parallel
    if _overlaps(at) and p.pp > 1 and at.chunks == 1:
        yield Violation(
            "parallel.vpp",
            f"overlap_moe_expert_parallel_comm in a pipeline (pp {p.pp}) needs virtual stages",
            {"pp": p.pp},
            ({"parallel.vpp": 2}, _OFF, {"parallel.pp": 1}),
        )


@rule("overlap_moe.recompute", "Layers whose exchanges are hidden are not recomputed whole.")
def recompute(at: RuleContext) -> Iterator[Violation]:
    """Recomputing the experts would send their tokens again, unhidden."""
    again = at.spec.recompute
    experts_again = again.granularity == "selective" and "moe" in again.modules
    if _overlaps(at) and (again.granularity == "full" or experts_again):
        what = "whole layers" if again.granularity == "full" else "experts"
        rest = tuple(module for module in again.modules if module != "moe")
        fewer: Fix = {"recompute.granularity": "selective", "recompute.modules": rest or ("attention",)}
        yield Violation(
            "recompute.granularity" if again.granularity == "full" else "recompute.modules",
            f"overlap_moe_expert_parallel_comm does not go with recomputing {what}",
            fixes=({"recompute.granularity": "none"}, fewer, _OFF),
        )


@rule("overlap_moe.precision", "Hidden exchanges carry 16-bit numbers.")
def precision(at: RuleContext) -> Iterator[Violation]:
    """As in Megatron: in fp32 they take twice as long, and there is nothing as long to hide them behind."""
    if _overlaps(at) and at.spec.precision.compute_dtype == "fp32":
        yield Violation(
            "precision.compute_dtype",
            "overlap_moe_expert_parallel_comm needs bf16, fp16 or fp8, and precision.compute_dtype is fp32",
            fixes=(_OFF, {"precision.compute_dtype": "bf16"}),
        )


@rule("overlap_moe.mtp", "At most one depth is predicted further ahead while exchanges are hidden.")
def mtp(at: RuleContext) -> Iterator[Violation]:
    """The depths follow one another, with nothing between that could hide the second one's exchange."""
    depths = at.spec.model.mtp.num_layers
    if _overlaps(at) and depths > 1:
        yield Violation(
            "model.mtp.num_layers",
            "overlap_moe_expert_parallel_comm needs at most one depth of multi-token prediction, "
            f"and there are {depths}",
            {"num_layers": depths},
            ({"model.mtp.num_layers": 1}, _OFF),
        )
