"""Rules of the router: how a token's experts are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalaunch.config.schema.moe import MoESpec
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest

_NO_GROUPS: Fix = {"model.moe.num_groups": None, "model.moe.top_k_groups": None}


@dataclass(frozen=True)
class _Groups:
    """Groups of experts, with the number of experts and of those and the groups that a token uses."""

    experts: int
    top_k: int
    groups: int
    used: int


def num_experts(at: RuleContext) -> Iterator[tuple[MoESpec, int]]:
    """The experts' settings and their number; nothing for a dense model."""
    moe = at.spec.model.moe
    if moe.num_experts is not None:
        yield moe, moe.num_experts


def _groups(at: RuleContext) -> _Groups | None:
    """The groups where both numbers of them are given."""
    moe = at.spec.model.moe
    if moe.num_experts is None or moe.num_groups is None or moe.top_k_groups is None:
        return None
    return _Groups(moe.num_experts, moe.top_k, moe.num_groups, moe.top_k_groups)


@rule("router.top_1", "With one expert a token, its weight is not normalised.")
def top_1(at: RuleContext) -> Iterator[Violation]:
    """Normalised over one expert the weight is always 1, and the router has no gradient."""
    for moe, experts in num_experts(at):
        if moe.top_k == 1 and experts > 1 and moe.normalize_top_k:
            yield Violation(
                "model.moe.normalize_top_k",
                "with top_k 1 a normalised weight is always 1, from which the router learns nothing",
                {"top_k": 1},
                ({"model.moe.normalize_top_k": False}, {"model.moe.top_k": 2}),
            )


@rule("router.scaling", "Experts are weighted by more than 0.")
def scaling(at: RuleContext) -> Iterator[Violation]:
    """scaling_factor 0 turns all of them off."""
    for moe, _ in num_experts(at):
        if moe.scaling_factor == 0:
            yield Violation(
                "model.moe.scaling_factor",
                "scaling_factor 0 leaves nothing of the experts' output",
                {"scaling_factor": 0.0},
                ({"model.moe.scaling_factor": 1.0},),
            )


@rule("router.bias_needs_sigmoid", "A bias that steers the choice of experts goes with sigmoid scores.")
def bias_needs_sigmoid(at: RuleContext) -> Iterator[Violation]:
    """Softmax scores compete, so that a bias means something else for every token (DeepSeek-V3, section 2.1.2)."""
    for moe, _ in num_experts(at):
        if moe.balance_bias and moe.score != "sigmoid":
            yield Violation(
                "model.moe.balance_bias",
                f"balance_bias needs score=sigmoid, and it is {moe.score}",
                fixes=(
                    {"model.moe.score": "sigmoid"},
                    {"model.moe.balance_bias": False},
                    {"model.moe.balance_bias": False, "model.moe.balance_bias_rate": 1e-3},
                ),
            )


@rule("router.bias_rate", "The steering bias moves exactly where there is one.")
def bias_rate(at: RuleContext) -> Iterator[Violation]:
    """Its step is balance_bias_rate."""
    for moe, _ in num_experts(at):
        if moe.balance_bias and moe.balance_bias_rate == 0:
            yield Violation(
                "model.moe.balance_bias_rate",
                "with balance_bias_rate 0 the bias stays at 0 and steers nothing",
                {"balance_bias_rate": 0.0},
                ({"model.moe.balance_bias_rate": 1e-3}, {"model.moe.balance_bias": False}),
                severity="warning",
            )
        elif not moe.balance_bias and moe.balance_bias_rate != 1e-3:
            yield Violation(
                "model.moe.balance_bias_rate",
                f"balance_bias_rate {moe.balance_bias_rate:g} has no effect: balance_bias is false",
                {"balance_bias_rate": moe.balance_bias_rate},
                ({"model.moe.balance_bias_rate": 1e-3}, {"model.moe.balance_bias": True}),
                severity="warning",
            )


@rule("router.groups_together", "Groups of experts come with the number of them that a token uses.")
def groups_together(at: RuleContext) -> Iterator[Violation]:
    """Either alone says nothing."""
    for moe, _ in num_experts(at):
        if moe.num_groups is None and moe.top_k_groups is not None:
            message = f"top_k_groups {moe.top_k_groups} is given without num_groups"
            yield Violation("model.moe.num_groups", message, {"top_k_groups": moe.top_k_groups}, (_NO_GROUPS,))
        elif moe.num_groups is not None and moe.top_k_groups is None:
            half = max(1, moe.num_groups // 2)
            yield Violation(
                "model.moe.top_k_groups",
                f"num_groups {moe.num_groups} is given without top_k_groups",
                {"num_groups": moe.num_groups},
                ({"model.moe.top_k_groups": half}, {"model.moe.top_k_groups": 1}, _NO_GROUPS),
            )


@rule("router.experts_by_groups", "Experts divide into their groups.")
def experts_by_groups(at: RuleContext) -> Iterator[Violation]:
    """Groups are alike in size."""
    g = _groups(at)
    if g is not None and g.experts % g.groups:
        yield Violation(
            "model.moe.num_groups",
            f"{g.experts} experts do not divide into {g.groups} groups",
            {"num_experts": g.experts, "num_groups": g.groups},
            (*nearest("model.moe.num_groups", g.groups, lambda n: g.experts % n == 0), _NO_GROUPS),
        )


@rule("router.groups_used", "A token uses no more groups than there are.")
def groups_used(at: RuleContext) -> Iterator[Violation]:
    """top_k_groups out of num_groups."""
    g = _groups(at)
    if g is not None and g.used > g.groups:
        yield Violation(
            "model.moe.top_k_groups",
            f"top_k_groups {g.used} is more than the {g.groups} groups",
            {"top_k_groups": g.used, "num_groups": g.groups},
            ({"model.moe.top_k_groups": g.groups}, {"model.moe.top_k_groups": max(1, g.groups // 2)}, _NO_GROUPS),
        )


@rule("router.top_k_by_groups", "A token's experts divide over the groups it uses.")
def top_k_by_groups(at: RuleContext) -> Iterator[Violation]:
    """A group is scored by its best top_k / top_k_groups experts.

    Megatron rounds down without a word: with fewer experts than groups every group's score is 0.
    """
    g = _groups(at)
    if g is not None and g.used <= g.groups and g.top_k % g.used:
        yield Violation(
            "model.moe.top_k_groups",
            f"top_k {g.top_k} does not divide by top_k_groups {g.used}",
            {"top_k": g.top_k, "top_k_groups": g.used},
            (
                *nearest("model.moe.top_k_groups", g.used, lambda n: g.top_k % n == 0 and n <= g.groups, 2),
                *nearest("model.moe.top_k", g.top_k, lambda n: n % g.used == 0, 1),
            ),
        )


@rule("router.groups_hold_top_k", "The groups that a token uses hold as many experts as it needs.")
def groups_hold_top_k(at: RuleContext) -> Iterator[Violation]:
    """Otherwise some of its experts come from groups it may not use."""
    g = _groups(at)
    if g is None or g.used > g.groups or g.experts % g.groups or g.top_k > g.experts:
        return
    size = g.experts // g.groups
    if g.used * size < g.top_k:
        enough = nearest(
            "model.moe.top_k_groups",
            g.used,
            lambda n: n <= g.groups and n * size >= g.top_k and g.top_k % n == 0,
            2,
        )
        yield Violation(
            "model.moe.top_k_groups",
            f"{g.used} groups of {size} experts hold {g.used * size}, and a token goes to {g.top_k}",
            {"top_k_groups": g.used, "room": g.used * size, "top_k": g.top_k},
            (*enough, {"model.moe.top_k": g.used * size}),
        )


@rule("router.precision", "The router computes in fp32.")
def precision(at: RuleContext) -> Iterator[Violation]:
    """In bf16 experts of nearly equal scores change places by rounding, which shows as spikes of the loss."""
    for moe, _ in num_experts(at):
        if moe.router_dtype == "bf16":
            yield Violation(
                "model.moe.router_dtype",
                "a router in bf16 mixes up experts of nearly equal scores",
                fixes=({"model.moe.router_dtype": "fp32"},),
                severity="warning",
            )


@rule("router.jitter", "Noise on the router's input is small.")
def jitter(at: RuleContext) -> Iterator[Violation]:
    """The input is multiplied by 1 - jitter to 1 + jitter: 0.01 is usual (Fedus et al. 2021), 1 may erase it."""
    for moe, _ in num_experts(at):
        if moe.input_jitter > 0.5:
            yield Violation(
                "model.moe.input_jitter",
                f"input_jitter {moe.input_jitter:g} changes the router's input by up to "
                f"{moe.input_jitter:.0%}; 0.01 is usual",
                {"input_jitter": moe.input_jitter},
                ({"model.moe.input_jitter": 0.01}, {"model.moe.input_jitter": 0.0}),
                severity="warning",
            )
