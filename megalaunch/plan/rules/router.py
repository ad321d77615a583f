"""Rules of the router: how a token's experts are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import nearest
from megalaunch.schema.moe import MoESpec

_NO_GROUPS: Fix = {"model.moe.num_groups": None, "model.moe.top_k_groups": None}


@dataclass(frozen=True)
class _Groups:
    """Groups of experts, with the number of experts and of those and the groups that a token uses."""

    experts: int
    top_k: int
    groups: int
    used: int
    scored: int | None


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
    return _Groups(moe.num_experts, moe.top_k, moe.num_groups, moe.top_k_groups, moe.group_score_top_k)


@rule("router.top_1", "With top_k 1 normalize_top_k is off.")
def top_1(at: RuleContext) -> Iterator[Violation]:
    """Normalised over one expert the weight is always 1, so the router has no gradient."""
    for moe, experts in num_experts(at):
        if moe.top_k == 1 and experts > 1 and moe.normalize_top_k:
            yield Violation(
                "model.moe.normalize_top_k",
                "with top_k 1 a normalised weight is always 1, so the router learns nothing",
                {"top_k": 1},
                ({"model.moe.normalize_top_k": False}, {"model.moe.top_k": 2}),
            )


@rule("router.scaling", "moe.scaling_factor is above 0.")
def scaling(at: RuleContext) -> Iterator[Violation]:
    """A factor of 0 disables all experts."""
    for moe, _ in num_experts(at):
        if moe.scaling_factor == 0:
            yield Violation(
                "model.moe.scaling_factor",
                "scaling_factor 0 sets the experts' output to 0",
                {"scaling_factor": 0.0},
                ({"model.moe.scaling_factor": 1.0},),
            )


@rule("router.bias_needs_sigmoid", "balance_bias is on only with score=sigmoid or sqrtsoftplus.")
def bias_needs_sigmoid(at: RuleContext) -> Iterator[Violation]:
    """Softmax scores compete, so a bias has another effect on every token (DeepSeek-V3, section 2.1.2)."""
    for moe, _ in num_experts(at):
        if moe.balance_bias and moe.score == "softmax":
            yield Violation(
                "model.moe.balance_bias",
                f"balance_bias needs score=sigmoid or sqrtsoftplus, but it is {moe.score}",
                fixes=(
                    {"model.moe.score": "sigmoid"},
                    {"model.moe.balance_bias": False},
                    {"model.moe.balance_bias": False, "model.moe.balance_bias_rate": 1e-3},
                ),
            )


@rule("router.bias_rate", "balance_bias and balance_bias_rate are set together.")
def bias_rate(at: RuleContext) -> Iterator[Violation]:
    """The rate is the step by which the bias changes."""
    for moe, _ in num_experts(at):
        if moe.balance_bias and moe.balance_bias_rate == 0:
            yield Violation(
                "model.moe.balance_bias_rate",
                "with balance_bias_rate 0 the bias stays at 0 and has no effect",
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


@rule("router.groups_together", "num_groups and top_k_groups are set together.")
def groups_together(at: RuleContext) -> Iterator[Violation]:
    """Either without the other has no meaning."""
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


@rule("router.experts_by_groups", "num_experts is divisible by num_groups.")
def experts_by_groups(at: RuleContext) -> Iterator[Violation]:
    """All groups have the same size."""
    g = _groups(at)
    if g is not None and g.experts % g.groups:
        yield Violation(
            "model.moe.num_groups",
            f"{g.experts} experts are not divisible by num_groups {g.groups}",
            {"num_experts": g.experts, "num_groups": g.groups},
            (*nearest("model.moe.num_groups", g.groups, lambda n: g.experts % n == 0), _NO_GROUPS),
        )


@rule("router.groups_used", "top_k_groups is at most num_groups.")
def groups_used(at: RuleContext) -> Iterator[Violation]:
    """A token uses top_k_groups of num_groups."""
    g = _groups(at)
    if g is not None and g.used > g.groups:
        yield Violation(
            "model.moe.top_k_groups",
            f"top_k_groups {g.used} is above num_groups {g.groups}",
            {"top_k_groups": g.used, "num_groups": g.groups},
            ({"model.moe.top_k_groups": g.groups}, {"model.moe.top_k_groups": max(1, g.groups // 2)}, _NO_GROUPS),
        )


@rule("router.top_k_by_groups", "top_k is divisible by top_k_groups, or group_score_top_k is set.")
def top_k_by_groups(at: RuleContext) -> Iterator[Violation]:
    """By default a group is scored by its best top_k / top_k_groups experts.

    Megatron-LM rounds down silently: with fewer experts than groups every group's score is 0.
    """
    g = _groups(at)
    if g is not None and g.scored is None and g.used <= g.groups and g.top_k % g.used:
        yield Violation(
            "model.moe.top_k_groups",
            f"top_k {g.top_k} is not divisible by top_k_groups {g.used}",
            {"top_k": g.top_k, "top_k_groups": g.used},
            (
                {"model.moe.group_score_top_k": 1},
                *nearest("model.moe.top_k_groups", g.used, lambda n: g.top_k % n == 0 and n <= g.groups, 2),
                *nearest("model.moe.top_k", g.top_k, lambda n: n % g.used == 0, 1),
            ),
        )


@rule("router.group_score", "group_score_top_k is at most the experts of a group, and set only with groups.")
def group_score(at: RuleContext) -> Iterator[Violation]:
    """A group's score is the sum of that many scores of its experts."""
    g, scored = _groups(at), at.spec.model.moe.group_score_top_k
    if scored is None or at.spec.model.moe.num_experts is None:
        return
    if g is None:
        yield Violation(
            "model.moe.group_score_top_k",
            f"group_score_top_k {scored} has no effect: there are no groups (num_groups, top_k_groups)",
            {"group_score_top_k": scored},
            ({"model.moe.group_score_top_k": None},),
            severity="warning",
        )
    elif g.experts % g.groups == 0 and scored > g.experts // g.groups:
        size = g.experts // g.groups
        yield Violation(
            "model.moe.group_score_top_k",
            f"group_score_top_k {scored} is above the {size} experts of a group",
            {"group_score_top_k": scored, "available": size},
            ({"model.moe.group_score_top_k": size}, {"model.moe.group_score_top_k": None}),
        )


@rule("router.groups_hold_top_k", "The groups of a token have at least top_k experts.")
def groups_hold_top_k(at: RuleContext) -> Iterator[Violation]:
    """Otherwise some experts would come from groups that the token may not use."""
    g = _groups(at)
    if g is None or g.used > g.groups or g.experts % g.groups or g.top_k > g.experts:
        return
    size = g.experts // g.groups
    if g.used * size < g.top_k:
        enough = nearest(
            "model.moe.top_k_groups",
            g.used,
            lambda n: n <= g.groups and n * size >= g.top_k and (g.scored is not None or g.top_k % n == 0),
            2,
        )
        yield Violation(
            "model.moe.top_k_groups",
            f"{g.used} groups of {size} experts have {g.used * size} experts, but top_k is {g.top_k}",
            {"top_k_groups": g.used, "available": g.used * size, "top_k": g.top_k},
            (*enough, {"model.moe.top_k": g.used * size}),
        )


@rule("router.precision", "The router computes in fp32.")
def precision(at: RuleContext) -> Iterator[Violation]:
    """In bf16 rounding swaps experts of nearly equal scores, which causes loss spikes."""
    for moe, _ in num_experts(at):
        if moe.router_dtype == "bf16":
            yield Violation(
                "model.moe.router_dtype",
                "a router in bf16 swaps experts of nearly equal scores",
                fixes=({"model.moe.router_dtype": "fp32"},),
                severity="warning",
            )


@rule("router.jitter", "moe.input_jitter is small.")
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
