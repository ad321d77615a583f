"""Rules of the experts themselves: how many, in which layers, over which ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
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
