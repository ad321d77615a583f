"""Rules of experts: their number, their layers, their ranks, and the overlap of their all-to-all."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest

register_inert(
    InertSetting(
        "moe.idle",
        "model.moe is set only with experts.",
        "moe.num_experts makes a model a mixture of experts.",
        ("model.moe.",),
        "model.moe.num_experts",
        lambda spec: spec.model.moe.num_experts is not None,
        "the model is dense (model.moe.num_experts is null)",
    )
)


@rule("moe.top_k", "moe.top_k is at most moe.num_experts.")
def top_k(at: RuleContext) -> Iterator[Violation]:
    """Megatron-LM does not check it and fails inside the router."""
    moe = at.spec.model.moe
    if moe.num_experts is not None and moe.top_k > moe.num_experts:
        yield Violation(
            "model.moe.top_k",
            f"top_k {moe.top_k} is above num_experts {moe.num_experts}",
            {"top_k": moe.top_k, "num_experts": moe.num_experts},
            ({"model.moe.top_k": moe.num_experts}, {"model.moe.top_k": 1}, {"model.moe.num_experts": moe.top_k}),
        )


@rule("moe.some_layer", "Some layer has experts.")
def some_layer(at: RuleContext) -> Iterator[Violation]:
    """The first moe.first_k_dense_replace layers are dense."""
    model, moe = at.spec.model, at.spec.model.moe
    if moe.num_experts is not None and moe.first_k_dense_replace >= model.num_layers:
        yield Violation(
            "model.moe.first_k_dense_replace",
            f"first_k_dense_replace {moe.first_k_dense_replace} leaves no layer of {model.num_layers} for experts",
            {"first_k_dense_replace": moe.first_k_dense_replace, "num_layers": model.num_layers},
            ({"model.moe.first_k_dense_replace": 0}, {"model.moe.first_k_dense_replace": 1}),
        )


@rule("moe.layer_freq_reaches", "moe.layer_freq gives experts to more than one layer.")
def layer_freq_reaches(at: RuleContext) -> Iterator[Violation]:
    """With a frequency above the number of layers after the dense ones, only one layer has experts."""
    model, moe = at.spec.model, at.spec.model.moe
    remaining = model.num_layers - moe.first_k_dense_replace
    if moe.num_experts is not None and moe.layer_freq > remaining > 0:
        yield Violation(
            "model.moe.layer_freq",
            f"of the {remaining} layers after the dense ones only the first has experts (layer_freq {moe.layer_freq})",
            {"every": moe.layer_freq, "layers": remaining},
            ({"model.moe.layer_freq": 1}, {"model.moe.layer_freq": 2}),
            severity="warning",
        )


@rule("moe.experts_by_ep", "moe.num_experts is divisible by ep.")
def experts_by_ep(at: RuleContext) -> Iterator[Violation]:
    """Every expert-parallel rank has the same number of complete experts."""
    experts, p = at.spec.model.moe.num_experts, at.spec.parallel
    if experts is not None and experts % p.ep:
        yield Violation(
            "parallel.ep",
            f"{experts} experts are not divisible by ep {p.ep}",
            {"num_experts": experts, "ep": p.ep},
            (*nearest("parallel.ep", p.ep, lambda n: experts % n == 0),),
        )


@rule("moe.tp_needs_sp", "With experts, tp above 1 needs sequence_parallel.")
def tp_needs_sp(at: RuleContext) -> Iterator[Violation]:
    """Without it all ranks of a tensor-parallel group have the same tokens, and each would dispatch them.

    Megatron-LM refuses it in the first forward pass.
    """
    p = at.spec.parallel
    if at.has_experts and p.tp > 1 and not p.sequence_parallel:
        yield Violation(
            "parallel.sequence_parallel",
            f"experts with tp {p.tp} need sequence_parallel=true: the ranks must have different tokens",
            {"tp": p.tp},
            ({"parallel.sequence_parallel": True}, {"parallel.tp": 1}),
        )


@rule("moe.compile_recompute", "With experts train.compile is off if full layers are recomputed.")
def compile_recompute(at: RuleContext) -> Iterator[Violation]:
    """Experts are not compiled, and torch.compile cannot leave a graph within a recomputed layer."""
    spec = at.spec
    if at.has_experts and spec.train.compile and spec.recompute.granularity == "full":
        yield Violation(
            "train.compile",
            "train.compile=true has no effect on layers with experts that are recomputed (recompute.granularity=full)",
            fixes=({"train.compile": False}, {"recompute.granularity": "none"}),
        )


@rule("moe.bias_by_etp", "Experts with biases have etp 1.")
def bias_by_etp(at: RuleContext) -> Iterator[Violation]:
    """The output bias would be added once per etp rank."""
    model, etp = at.spec.model, at.spec.parallel.etp or 1
    if model.moe.num_experts is not None and model.mlp_bias and etp > 1:
        yield Violation(
            "parallel.etp",
            f"biases of experts (mlp_bias) need etp 1, but it is {etp}",
            {"etp": etp},
            ({"parallel.etp": 1}, {"model.mlp_bias": False}),
        )


@rule("moe.dispatcher_without_ep", "moe_token_dispatcher_type is set only with ep above 1.")
def dispatcher_without_ep(at: RuleContext) -> Iterator[Violation]:
    """With ep 1 every rank has all experts, and no token is sent."""
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
    """Return whether the overlap is on and there is an all-to-all."""
    return at.spec.parallel.overlap_moe_expert_parallel_comm and at.has_experts and at.spec.parallel.ep > 1


@rule("overlap_moe.all_to_all", "overlap_moe_expert_parallel_comm is on only with ep above 1.")
def all_to_all(at: RuleContext) -> Iterator[Violation]:
    """With ep 1 there is no all-to-all to overlap."""
    if at.spec.parallel.overlap_moe_expert_parallel_comm and not _overlaps(at):
        why = f"ep is {at.spec.parallel.ep}" if at.has_experts else "the model is dense"
        yield Violation(
            "parallel.overlap_moe_expert_parallel_comm",
            f"overlap_moe_expert_parallel_comm=true has no effect: {why}",
            {"ep": at.spec.parallel.ep},
            (_OFF, {"parallel.ep": 2}),
            severity="warning",
        )


@rule("overlap_moe.dispatcher", "overlap_moe_expert_parallel_comm uses the alltoall or flex dispatcher.")
def dispatcher(at: RuleContext) -> Iterator[Violation]:
    """The halves of a microbatch are sent by all-to-alls of their own; an all-gather is one collective."""
    if _overlaps(at) and at.spec.parallel.moe_token_dispatcher_type == "allgather":
        yield Violation(
            "parallel.moe_token_dispatcher_type",
            "overlap_moe_expert_parallel_comm needs moe_token_dispatcher_type=alltoall or flex, but it is allgather",
            fixes=({"parallel.moe_token_dispatcher_type": "alltoall"}, _OFF),
        )
