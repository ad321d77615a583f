"""Rules of expert load balancing: losses, biases, capacities."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule


@rule("router.loss_coeff", "balance_loss and balance_loss_coeff are set together.")
def loss_coeff(at: RuleContext) -> Iterator[Violation]:
    """Either without the other has no effect."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.balance_loss == "none" and moe.balance_loss_coeff > 0:
        yield Violation(
            "model.moe.balance_loss_coeff",
            f"balance_loss_coeff {moe.balance_loss_coeff:g} has no effect: balance_loss is none",
            {"balance_loss_coeff": moe.balance_loss_coeff},
            ({"model.moe.balance_loss": "batch"}, {"model.moe.balance_loss_coeff": 0.0}),
            severity="warning",
        )
    elif moe.balance_loss != "none" and moe.balance_loss_coeff == 0:
        yield Violation(
            "model.moe.balance_loss",
            f"balance_loss={moe.balance_loss} has no effect: balance_loss_coeff is 0",
            {"balance_loss_coeff": 0.0},
            ({"model.moe.balance_loss_coeff": 0.01}, {"model.moe.balance_loss": "none"}),
            severity="warning",
        )


@rule("router.balance", "A loss or a bias balances the load of experts.")
def balance(at: RuleContext) -> Iterator[Violation]:
    """Otherwise a router soon sends most tokens to few experts (Shazeer et al. 2017). A capacity drops them."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    experts, drops = moe.num_experts, moe.capacity_factor is not None
    if experts > moe.top_k and moe.balance_loss == "none" and not moe.balance_bias and moe.choice == "scores":
        fix: Fix = {"model.moe.balance_loss": "batch", "model.moe.balance_loss_coeff": 0.01}
        yield Violation(
            "model.moe.balance_loss",
            f"the load of {experts} experts is not balanced: "
            + ("full experts drop more and more tokens" if drops else "right for fine-tuning, not for pretraining"),
            {"num_experts": experts},
            (fix, {"model.moe.capacity_factor": None}) if drops else (fix,),
            severity="warning" if drops else "note",
        )


@rule("router.sinkhorn", "With choice=sinkhorn there is no balance loss or bias, and no group of experts.")
def sinkhorn(at: RuleContext) -> Iterator[Violation]:
    """The assignment balances the load by itself, and takes any expert (Megatron-LM asserts the first)."""
    moe = at.spec.model.moe
    if moe.num_experts is None or moe.choice != "sinkhorn":
        return
    off: dict[str, object] = {}
    if moe.balance_loss != "none":
        off |= {"balance_loss": "none", "balance_loss_coeff": 0.0}
    if moe.balance_bias:
        off["balance_bias"] = False
    if moe.num_groups is not None or moe.top_k_groups is not None:
        off |= {"num_groups": None, "top_k_groups": None, "group_score_top_k": None}
    if off:
        yield Violation(
            "model.moe.choice",
            f"choice=sinkhorn does not go with {', '.join(off)}",
            fixes=({"model.moe.choice": "scores"}, {f"model.moe.{key}": value for key, value in off.items()}),
        )


@rule("router.capacity", "capacity_factor is at least 1.")
def capacity(at: RuleContext) -> Iterator[Violation]:
    """At 0 experts get no tokens; below 1 tokens are dropped even under a balanced load."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    factor = moe.capacity_factor
    if factor is not None and factor < 1:
        yield Violation(
            "model.moe.capacity_factor",
            f"capacity_factor {factor:g} "
            + ("drops every token" if factor == 0 else "drops tokens even under a balanced load"),
            {"capacity_factor": factor},
            ({"model.moe.capacity_factor": 1.25}, {"model.moe.capacity_factor": None}),
            severity="warning" if factor else "error",
        )


@rule("router.pad_needs_capacity", "pad_to_capacity is on only with capacity_factor.")
def pad_needs_capacity(at: RuleContext) -> Iterator[Violation]:
    """Without a capacity there is no size to pad to."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.pad_to_capacity and moe.capacity_factor is None:
        yield Violation(
            "model.moe.pad_to_capacity",
            "pad_to_capacity needs capacity_factor",
            fixes=({"model.moe.pad_to_capacity": False}, {"model.moe.capacity_factor": 1.25}),
        )


@rule("router.pad_needs_all_to_all", "pad_to_capacity is on only with moe_token_dispatcher_type=alltoall.")
def pad_needs_all_to_all(at: RuleContext) -> Iterator[Violation]:
    """DeepEP sizes its buffers by the tokens that arrive; after an all-gather each rank picks its rows."""
    moe, dispatcher = at.spec.model.moe, at.spec.parallel.moe_token_dispatcher_type
    if moe.num_experts is None:
        return
    if moe.pad_to_capacity and dispatcher != "alltoall":
        yield Violation(
            "model.moe.pad_to_capacity",
            f"pad_to_capacity is not supported with moe_token_dispatcher_type={dispatcher}",
            fixes=({"model.moe.pad_to_capacity": False}, {"parallel.moe_token_dispatcher_type": "alltoall"}),
        )


@rule("router.drop_needs_capacity", "drop_policy is set only with capacity_factor.")
def drop_needs_capacity(at: RuleContext) -> Iterator[Violation]:
    """Without a capacity no token is dropped."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.drop_policy != "probs" and moe.capacity_factor is None:
        yield Violation(
            "model.moe.drop_policy",
            f"drop_policy={moe.drop_policy} has no effect: no token is dropped without capacity_factor",
            fixes=({"model.moe.drop_policy": "probs"}, {"model.moe.capacity_factor": 1.25}),
            severity="warning",
        )


@rule("router.z_loss", "z_loss_coeff is small.")
def z_loss(at: RuleContext) -> Iterator[Violation]:
    """1e-3 is usual (Zoph et al. 2022); above about 0.1 small logits matter more than the right experts."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.z_loss_coeff > 0.1:
        yield Violation(
            "model.moe.z_loss_coeff",
            f"z_loss_coeff {moe.z_loss_coeff:g} outweighs the training loss in the router; 1e-3 is usual",
            {"z_loss_coeff": moe.z_loss_coeff},
            ({"model.moe.z_loss_coeff": 1e-3},),
            severity="warning",
        )
