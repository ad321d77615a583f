"""Rules of experts: their number, their layers, their ranks, and the overlap of their all-to-all."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest
from megalaunch.platform.chips import CHIPS

register_inert(
    InertSetting(
        "moe.idle",
        "The settings of model.moe go with experts.",
        "moe.num_experts makes a model a mixture of experts.",
        ("model.moe.",),
        "model.moe.num_experts",
        lambda spec: spec.model.moe.num_experts is not None,
        "the model is dense (model.moe.num_experts is null)",
    )
)


@rule("moe.top_k", "A token goes to no more experts than there are.")
def top_k(at: RuleContext) -> Iterator[Violation]:
    """Megatron does not check it, and fails inside the router."""
    moe = at.spec.model.moe
    if moe.num_experts is not None and moe.top_k > moe.num_experts:
        yield Violation(
            "model.moe.top_k",
            f"top_k {moe.top_k} is more than the {moe.num_experts} experts",
            {"top_k": moe.top_k, "num_experts": moe.num_experts},
            ({"model.moe.top_k": moe.num_experts}, {"model.moe.top_k": 1}, {"model.moe.num_experts": moe.top_k}),
        )


@rule("moe.some_layer", "Some layer has the experts.")
def some_layer(at: RuleContext) -> Iterator[Violation]:
    """moe.first_k_dense_replace come first; with as many as the model has, none is left for experts."""
    model, moe = at.spec.model, at.spec.model.moe
    if moe.num_experts is not None and moe.first_k_dense_replace >= model.num_layers:
        yield Violation(
            "model.moe.first_k_dense_replace",
            f"first_k_dense_replace {moe.first_k_dense_replace} leaves none of {model.num_layers} layers for experts",
            {"first_k_dense_replace": moe.first_k_dense_replace, "num_layers": model.num_layers},
            ({"model.moe.first_k_dense_replace": 0}, {"model.moe.first_k_dense_replace": 1}),
        )


@rule("moe.layer_freq_reaches", "Every n-th layer has experts: more than one does.")
def layer_freq_reaches(at: RuleContext) -> Iterator[Violation]:
    """Where n is larger than what is left behind the dense layers, a single layer has experts."""
    model, moe = at.spec.model, at.spec.model.moe
    room = model.num_layers - moe.first_k_dense_replace
    if moe.num_experts is not None and moe.layer_freq > room > 0:
        yield Violation(
            "model.moe.layer_freq",
            f"of the {room} layers behind the dense ones only the first has experts (every {moe.layer_freq})",
            {"every": moe.layer_freq, "layers": room},
            ({"model.moe.layer_freq": 1}, {"model.moe.layer_freq": 2}),
            severity="warning",
        )


@rule("moe.experts_by_ep", "Experts divide over expert-parallel ranks.")
def experts_by_ep(at: RuleContext) -> Iterator[Violation]:
    """Every rank holds the same number of whole experts."""
    experts, p = at.spec.model.moe.num_experts, at.spec.parallel
    if experts is not None and experts % p.ep:
        yield Violation(
            "parallel.ep",
            f"{experts} experts do not divide by ep {p.ep}",
            {"num_experts": experts, "ep": p.ep},
            (*nearest("parallel.ep", p.ep, lambda n: experts % n == 0),),
        )


@rule("moe.tp_needs_sp", "Experts beside tensor parallelism need sequence parallelism.")
def tp_needs_sp(at: RuleContext) -> Iterator[Violation]:
    """Without it all ranks of a tensor-parallel group hold the same tokens, and would send each of them to the experts.
    Megatron refuses it in the first forward pass.
    """
    p = at.spec.parallel
    if at.has_experts and p.tp > 1 and not p.sequence_parallel:
        yield Violation(
            "parallel.sequence_parallel",
            f"experts under tp {p.tp} need sequence_parallel=true: tokens must differ between the ranks",
            {"tp": p.tp},
            ({"parallel.sequence_parallel": True}, {"parallel.tp": 1}),
        )


@rule("moe.bias_by_etp", "Experts that are split over ranks have no biases.")
def bias_by_etp(at: RuleContext) -> Iterator[Violation]:
    """The output bias would be added once for each part."""
    model, etp = at.spec.model, at.spec.parallel.etp or 1
    if model.moe.num_experts is not None and model.mlp_bias and etp > 1:
        yield Violation(
            "parallel.etp",
            f"biases of experts (mlp_bias) need etp 1, and it is {etp}",
            {"etp": etp},
            ({"parallel.etp": 1}, {"model.mlp_bias": False}),
        )


@rule("moe.flex_needs_ranks", "A fused dispatch has ranks to send to.")
def flex_needs_ranks(at: RuleContext) -> Iterator[Violation]:
    """DeepEP's kernels exchange between GPUs; with tp and ep both 1 there is nobody."""
    p = at.spec.parallel
    if at.has_experts and p.moe_token_dispatcher_type == "flex" and p.tp * p.ep == 1:
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            "moe_token_dispatcher_type=flex needs tp x ep above 1",
            {"tp": p.tp, "ep": p.ep},
            ({"parallel.moe_token_dispatcher_type": "alltoall"}, {"parallel.ep": 2}),
        )


@rule("moe.flex_needs_gpu", "A fused dispatch runs on NVIDIA GPUs.")
def flex_needs_gpu(at: RuleContext) -> Iterator[Violation]:
    """DeepEP is written for NVLink and NVSHMEM."""
    chip = CHIPS.get(at.spec.platform.chip)
    fits = chip is None or chip.visible_devices_variable == "CUDA_VISIBLE_DEVICES"
    if at.has_experts and at.spec.parallel.moe_token_dispatcher_type == "flex" and not fits:
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            f"moe_token_dispatcher_type=flex has no kernels for {at.spec.platform.chip}",
            fixes=({"parallel.moe_token_dispatcher_type": "alltoall"},),
        )


@rule("moe.flex_router", "A fused dispatch takes the router's weights in fp32.")
def flex_router(at: RuleContext) -> Iterator[Violation]:
    """Its kernels know no other format of weights."""
    spec = at.spec
    if at.has_experts and spec.parallel.moe_token_dispatcher_type == "flex" and spec.model.moe.router_dtype != "fp32":
        yield Violation(
            "model.moe.router_dtype",
            f"moe_token_dispatcher_type=flex takes weights in fp32, and router_dtype is {spec.model.moe.router_dtype}",
            fixes=({"model.moe.router_dtype": "fp32"}, {"parallel.moe_token_dispatcher_type": "alltoall"}),
        )


@rule("moe.dispatcher_without_ep", "A way of dispatch is chosen where tokens travel.")
def dispatcher_without_ep(at: RuleContext) -> Iterator[Violation]:
    """With ep 1 every rank has all experts, and tokens stay where they are."""
    p = at.spec.parallel
    if at.has_experts and p.ep == 1 and p.moe_token_dispatcher_type == "allgather":
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            "moe_token_dispatcher_type=allgather has no effect: ep is 1, and tokens stay where they are",
            {"ep": 1},
            ({"parallel.moe_token_dispatcher_type": "alltoall"},),
            severity="warning",
        )


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
