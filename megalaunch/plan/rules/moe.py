"""Rules of the experts themselves: how many, in which layers, over which ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.dependent import Dependent, depends
from megalaunch.plan.rules.nearby import nearest
from megalaunch.plan.rules.registry import Broken, Situation, rule
from megalaunch.platform.facts import CHIPS

depends(
    Dependent(
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
def top_k(at: Situation) -> Iterator[Broken]:
    """Megatron does not check it, and fails inside the router."""
    moe = at.spec.model.moe
    if moe.num_experts is not None and moe.top_k > moe.num_experts:
        yield Broken(
            "model.moe.top_k",
            f"top_k {moe.top_k} is more than the {moe.num_experts} experts",
            {"top_k": moe.top_k, "num_experts": moe.num_experts},
            ({"model.moe.top_k": moe.num_experts}, {"model.moe.top_k": 1}, {"model.moe.num_experts": moe.top_k}),
        )


@rule("moe.some_layer", "Some layer has the experts.")
def some_layer(at: Situation) -> Iterator[Broken]:
    """moe.dense_layers come first; with as many as the model has, none is left for experts."""
    model, moe = at.spec.model, at.spec.model.moe
    if moe.num_experts is not None and moe.dense_layers >= model.num_layers:
        yield Broken(
            "model.moe.dense_layers",
            f"dense_layers {moe.dense_layers} leaves none of {model.num_layers} layers for experts",
            {"dense_layers": moe.dense_layers, "num_layers": model.num_layers},
            ({"model.moe.dense_layers": 0}, {"model.moe.dense_layers": 1}),
        )


@rule("moe.every_reaches", "Every n-th layer has experts: more than one does.")
def every_reaches(at: Situation) -> Iterator[Broken]:
    """Where n is larger than what is left behind the dense layers, a single layer has experts."""
    model, moe = at.spec.model, at.spec.model.moe
    room = model.num_layers - moe.dense_layers
    if moe.num_experts is not None and moe.every > room > 0:
        yield Broken(
            "model.moe.every",
            f"of the {room} layers behind the dense ones only the first has experts (every {moe.every})",
            {"every": moe.every, "layers": room},
            ({"model.moe.every": 1}, {"model.moe.every": 2}),
            severity="warning",
        )


@rule("moe.experts_by_ep", "Experts divide over expert-parallel ranks.")
def experts_by_ep(at: Situation) -> Iterator[Broken]:
    """Every rank holds the same number of whole experts."""
    experts, p = at.spec.model.moe.num_experts, at.spec.parallel
    if experts is not None and experts % p.ep:
        yield Broken(
            "parallel.ep",
            f"{experts} experts do not divide by ep {p.ep}",
            {"num_experts": experts, "ep": p.ep},
            (*nearest("parallel.ep", p.ep, lambda n: experts % n == 0),),
        )


@rule("moe.tp_needs_sp", "Experts beside tensor parallelism need sequence parallelism.")
def tp_needs_sp(at: Situation) -> Iterator[Broken]:
    """Without it all ranks of a tensor-parallel group hold the same tokens, and would send each of them to the experts.
    Megatron refuses it in the first forward pass.
    """
    p = at.spec.parallel
    if at.has_experts and p.tp > 1 and not p.sequence_parallel:
        yield Broken(
            "parallel.sequence_parallel",
            f"experts under tp {p.tp} need sequence_parallel=true: tokens must differ between the ranks",
            {"tp": p.tp},
            ({"parallel.sequence_parallel": True}, {"parallel.tp": 1}),
        )


@rule("moe.bias_by_etp", "Experts that are split over ranks have no biases.")
def bias_by_etp(at: Situation) -> Iterator[Broken]:
    """The output bias would be added once for each part."""
    model, etp = at.spec.model, at.spec.parallel.etp or 1
    if model.moe.num_experts is not None and model.mlp_bias and etp > 1:
        yield Broken(
            "parallel.etp",
            f"biases of experts (mlp_bias) need etp 1, and it is {etp}",
            {"etp": etp},
            ({"parallel.etp": 1}, {"model.mlp_bias": False}),
        )


@rule("moe.flex_needs_ranks", "A fused dispatch has ranks to send to.")
def flex_needs_ranks(at: Situation) -> Iterator[Broken]:
    """DeepEP's kernels exchange between GPUs; with tp and ep both 1 there is nobody."""
    p = at.spec.parallel
    if at.has_experts and p.expert_dispatch == "flex" and p.tp * p.ep == 1:
        yield Broken(
            "parallel.expert_dispatch",
            "expert_dispatch=flex needs tp x ep above 1",
            {"tp": p.tp, "ep": p.ep},
            ({"parallel.expert_dispatch": "alltoall"}, {"parallel.ep": 2}),
        )


@rule("moe.flex_needs_gpu", "A fused dispatch runs on NVIDIA GPUs.")
def flex_needs_gpu(at: Situation) -> Iterator[Broken]:
    """DeepEP is written for NVLink and NVSHMEM."""
    chip = CHIPS.get(at.spec.platform.chip)
    fits = chip is None or chip.visible_devices_variable == "CUDA_VISIBLE_DEVICES"
    if at.has_experts and at.spec.parallel.expert_dispatch == "flex" and not fits:
        yield Broken(
            "parallel.expert_dispatch",
            f"expert_dispatch=flex has no kernels for {at.spec.platform.chip}",
            fixes=({"parallel.expert_dispatch": "alltoall"},),
        )


@rule("moe.flex_router", "A fused dispatch takes the router's weights in fp32.")
def flex_router(at: Situation) -> Iterator[Broken]:
    """Its kernels know no other format of weights."""
    spec = at.spec
    if at.has_experts and spec.parallel.expert_dispatch == "flex" and spec.model.moe.router_dtype != "fp32":
        yield Broken(
            "model.moe.router_dtype",
            f"expert_dispatch=flex takes weights in fp32, and router_dtype is {spec.model.moe.router_dtype}",
            fixes=({"model.moe.router_dtype": "fp32"}, {"parallel.expert_dispatch": "alltoall"}),
        )


@rule("moe.dispatch_alone", "A way of dispatch is chosen where tokens travel.")
def dispatch_alone(at: Situation) -> Iterator[Broken]:
    """With ep 1 every rank has all experts, and tokens stay where they are."""
    p = at.spec.parallel
    if at.has_experts and p.ep == 1 and p.expert_dispatch == "allgather":
        yield Broken(
            "parallel.expert_dispatch",
            "expert_dispatch=allgather has no effect: ep is 1, and tokens stay where they are",
            {"ep": 1},
            ({"parallel.expert_dispatch": "alltoall"},),
            severity="warning",
        )
