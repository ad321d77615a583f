"""Rules of how the load of experts is kept even: losses, biases, capacities."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule


@rule("router.loss_coeff", "An auxiliary loss has a kind and a weight.")
def loss_coeff(at: RuleContext) -> Iterator[Violation]:
    """Either without the other changes nothing."""
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


@rule("router.balance", "Something keeps the experts' load even.")
def balance(at: RuleContext) -> Iterator[Violation]:
    """Without a loss, a bias or a capacity a router soon sends most tokens to few experts (Shazeer et al. 2017)."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    experts = moe.num_experts
    if experts > moe.top_k and moe.balance_loss == "none" and not moe.balance_bias and moe.capacity_factor is None:
        yield Violation(
            "model.moe.balance_loss",
            f"nothing keeps the load of {experts} experts even: fine to tune a trained model, not to start one",
            {"num_experts": experts},
            ({"model.moe.balance_loss": "batch", "model.moe.balance_loss_coeff": 0.01},),
            severity="note",
        )


@rule("router.capacity", "An expert takes at least its even share.")
def capacity(at: RuleContext) -> Iterator[Violation]:
    """At 0 it takes nothing; below 1 tokens are dropped however even the load is."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    factor = moe.capacity_factor
    if factor is not None and factor < 1:
        yield Violation(
            "model.moe.capacity_factor",
            f"capacity_factor {factor:g} "
            + ("lets no token reach an expert" if factor == 0 else "drops tokens even where the load is even"),
            {"capacity_factor": factor},
            ({"model.moe.capacity_factor": 1.25}, {"model.moe.capacity_factor": None}),
            severity="warning" if factor else "error",
        )


@rule("router.pad_needs_capacity", "Experts are padded to a capacity that is given.")
def pad_needs_capacity(at: RuleContext) -> Iterator[Violation]:
    """Without one a buffer has no full size."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.pad_to_capacity and moe.capacity_factor is None:
        yield Violation(
            "model.moe.pad_to_capacity",
            "pad_to_capacity needs capacity_factor",
            fixes=({"model.moe.pad_to_capacity": False}, {"model.moe.capacity_factor": 1.25}),
        )


@rule("router.pad_without_flex", "A fused dispatch sends what there is, without padding.")
def pad_without_flex(at: RuleContext) -> Iterator[Violation]:
    """DeepEP's buffers follow the tokens that come."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.pad_to_capacity and at.spec.parallel.moe_token_dispatcher_type == "flex":
        yield Violation(
            "model.moe.pad_to_capacity",
            "pad_to_capacity does not go with moe_token_dispatcher_type=flex",
            fixes=({"model.moe.pad_to_capacity": False}, {"parallel.moe_token_dispatcher_type": "alltoall"}),
        )


@rule("router.drop_needs_capacity", "A policy of dropping goes with a capacity.")
def drop_needs_capacity(at: RuleContext) -> Iterator[Violation]:
    """Without one no token is dropped."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.drop_policy != "probs" and moe.capacity_factor is None:
        yield Violation(
            "model.moe.drop_policy",
            f"drop_policy={moe.drop_policy} has no effect: nothing is dropped without capacity_factor",
            fixes=({"model.moe.drop_policy": "probs"}, {"model.moe.capacity_factor": 1.25}),
            severity="warning",
        )


@rule("router.z_loss", "The z-loss of the router is a small part of the loss.")
def z_loss(at: RuleContext) -> Iterator[Violation]:
    """1e-3 is usual (Zoph et al. 2022); from about 0.1 on small logits matter more than the right experts."""
    moe = at.spec.model.moe
    if moe.num_experts is None:
        return
    if moe.z_loss_coeff > 0.1:
        yield Violation(
            "model.moe.z_loss_coeff",
            f"z_loss_coeff {moe.z_loss_coeff:g} outweighs what the router learns from the text; 1e-3 is usual",
            {"z_loss_coeff": moe.z_loss_coeff},
            ({"model.moe.z_loss_coeff": 1e-3},),
            severity="warning",
        )
