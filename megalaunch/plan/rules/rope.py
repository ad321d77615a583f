"""Rules of rotary positions and of their stretch beyond the length of training."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule

register_inert(
    InertSetting(
        "rope.idle",
        "The settings of model.rope go with rotary positions.",
        "Other positions do not read them.",
        ("model.rope.",),
        "model.position_embedding",
        lambda spec: spec.model.position_embedding == "rope",
        "model.position_embedding is not rope",
    )
)
register_inert(
    InertSetting(
        "rope.never_idle",
        "Layers without rotation go with rotary positions.",
        "With other positions no layer rotates.",
        ("model.no_rope_layer_interval",),
        "model.position_embedding",
        lambda spec: spec.model.position_embedding == "rope",
        "model.position_embedding is not rope",
    )
)
register_inert(
    InertSetting(
        "rope.window_idle",
        "A base of windowed layers goes with a sliding window.",
        "Without one there are no such layers.",
        ("model.rope.window_theta",),
        "model.sliding_window",
        lambda spec: spec.model.sliding_window is not None,
        "model.sliding_window is null, so that every layer sees all tokens",
    )
)
register_inert(
    InertSetting(
        "rope.factor_idle",
        "A factor stretches by some scaling.",
        "rope.scaling says how.",
        ("model.rope.factor",),
        "model.rope.scaling",
        lambda spec: spec.model.rope.scaling != "none" or spec.model.rope.original_positions is not None,
        "model.rope.scaling is none",
        ({"model.rope.scaling": "linear"},),
    )
)
register_inert(
    InertSetting(
        "rope.original_idle",
        "The context before the stretch goes with llama3, yarn and longrope.",
        "They stretch waves by how often they turn in it; a stretch that is turned off keeps its numbers.",
        ("model.rope.original_positions",),
        "model.rope.scaling",
        lambda spec: spec.model.rope.scaling != "linear",
        "model.rope.scaling is linear",
    )
)
register_inert(
    InertSetting(
        "rope.llama3_idle",
        "The frequency factors are parts of the llama3 scaling.",
        "Other scalings have none.",
        ("model.rope.low_frequency_factor", "model.rope.high_frequency_factor"),
        "model.rope.scaling",
        lambda spec: spec.model.rope.scaling in ("llama3", "none"),
        "model.rope.scaling is not llama3",
    )
)
register_inert(
    InertSetting(
        "rope.longrope_idle",
        "Short and long factors are parts of the longrope scaling.",
        "Other scalings have none.",
        ("model.rope.short_factors", "model.rope.long_factors"),
        "model.rope.scaling",
        lambda spec: spec.model.rope.scaling == "longrope",
        "model.rope.scaling is not longrope",
    )
)
register_inert(
    InertSetting(
        "rope.attention_factor_idle",
        "An attention factor is part of the yarn and longrope scalings.",
        "Other scalings have none.",
        ("model.rope.attention_factor",),
        "model.rope.scaling",
        lambda spec: spec.model.rope.scaling in ("yarn", "longrope"),
        "model.rope.scaling is neither yarn nor longrope",
    )
)
register_inert(
    InertSetting(
        "rope.yarn_idle",
        "Betas, mscale and truncate are parts of the yarn scaling.",
        "Other scalings have none.",
        (
            "model.rope.beta_fast",
            "model.rope.beta_slow",
            "model.rope.mscale",
            "model.rope.mscale_all_dim",
            "model.rope.truncate",
        ),
        "model.rope.scaling",
        lambda spec: spec.model.rope.scaling in ("yarn", "none"),
        "model.rope.scaling is not yarn",
    )
)


def _stretched(positions: int, factor: float) -> int:
    return int(positions * Fraction(factor))  # exact: no size of either is too large


def _shrunk(positions: int, factor: float) -> int:
    return int(positions / Fraction(factor))


@rule("rope.rotated_width", "The rotated part of a head is an even number of at least 2.")
def rotated_width(at: RuleContext) -> Iterator[Violation]:
    """Rotary positions turn pairs; rope.fraction of the head takes part."""
    model, fraction = at.spec.model, at.spec.model.rope.fraction
    if model.position_embedding != "rope" or model.mla.kv_lora_rank is not None or model.head_dim is None:
        return
    width = model.head_dim * Fraction(fraction).limit_denominator(10**6)
    if fraction == 1 or (width >= 2 and width % 2 == 0):
        return
    even = max(2, round(width / 2) * 2)
    has = f"{float(width):g}" if width.denominator > 1 else str(width)
    fixes: list[Fix] = (
        [{"model.rope.fraction": float(Fraction(even, model.head_dim))}] if even <= model.head_dim else []
    )
    if fraction == 0:
        fixes = [{"model.position_embedding": "none", "model.rope.fraction": 1.0}, *fixes]
    yield Violation(
        "model.rope.fraction",
        f"fraction {fraction:g} of head_dim {model.head_dim} is {has}, and rotary positions turn pairs",
        {"fraction": fraction, "head_dim": model.head_dim},
        (*fixes, {"model.rope.fraction": 1.0}),
    )


@rule("rope.factor_one", "A stretch has a factor above 1.")
def factor_one(at: RuleContext) -> Iterator[Violation]:
    """By 1 nothing is stretched."""
    model, rope = at.spec.model, at.spec.model.rope
    if model.position_embedding == "rope" and rope.scaling != "none" and rope.factor == 1:
        yield Violation(
            "model.rope.factor",
            f"scaling {rope.scaling} by a factor of 1 stretches nothing",
            {"factor": 1.0},
            (
                {"model.rope.factor": 8.0},
                {"model.rope.scaling": "none"},
                {"model.rope.scaling": "none", "model.rope.original_positions": None},
            ),
            severity="warning",
        )


@rule("rope.longrope_factors", "Each pair of a rotated head has a short and a long factor.")
def longrope_factors(at: RuleContext) -> Iterator[Violation]:
    """Its frequency is divided by the one or the other, depending on the length of the text."""
    model, rope = at.spec.model, at.spec.model.rope
    if rope.scaling != "longrope" or model.head_dim is None:
        return
    pairs = round(model.head_dim * rope.fraction) // 2
    for key in ("short_factors", "long_factors"):
        factors = getattr(rope, key)
        if len(factors) != pairs or not all(factors):
            yield Violation(
                f"model.rope.{key}",
                f"longrope needs a factor above 0 for each of the {pairs} pairs that are rotated, and {key} has "
                f"{len(factors)}",
                {"pairs": pairs, key: len(factors)},
                ({"model.rope.scaling": "none", "model.rope.short_factors": (), "model.rope.long_factors": ()},),
            )


@rule("rope.longrope_context", "Longrope goes without context parallelism.")
def longrope_context(at: RuleContext) -> Iterator[Violation]:
    """Which factors count follows from the length of the whole text, and a rank of cp sees a part of it."""
    if at.spec.model.rope.scaling == "longrope" and at.spec.parallel.cp > 1:
        yield Violation(
            "parallel.cp",
            f"longrope depends on the length of the whole text, and each of {at.spec.parallel.cp} ranks sees a part",
            {"cp": at.spec.parallel.cp},
            ({"parallel.cp": 1},),
        )


@rule("rope.original_missing", "The llama3, yarn and longrope scalings know the context before the stretch.")
def original_missing(at: RuleContext) -> Iterator[Violation]:
    """Which waves are stretched depends on it."""
    model, rope = at.spec.model, at.spec.model.rope
    if rope.scaling in ("llama3", "yarn", "longrope") and rope.original_positions is None:
        guess = max(1, _shrunk(model.max_position_embeddings, rope.factor))
        yield Violation(
            "model.rope.original_positions",
            f"scaling {rope.scaling} needs original_positions, the context before the stretch",
            {"max_position_embeddings": model.max_position_embeddings, "factor": rope.factor},
            ({"model.rope.original_positions": guess}, {"model.rope.original_positions": 8192}),
        )


@rule("rope.original_longer", "The context before the stretch is no longer than the one after it.")
def original_longer(at: RuleContext) -> Iterator[Violation]:
    """max_position_embeddings is the length after the stretch."""
    model, rope = at.spec.model, at.spec.model.rope
    original, longest = rope.original_positions, model.max_position_embeddings
    if rope.scaling in ("llama3", "yarn", "longrope") and original is not None and original > longest:
        yield Violation(
            "model.rope.original_positions",
            f"original_positions {original} is longer than the model's {longest} positions after the stretch",
            {"original_positions": original, "max_position_embeddings": longest},
            (
                {"model.max_position_embeddings": _stretched(original, rope.factor)},
                {"model.rope.original_positions": longest},
            ),
            severity="warning",
        )


@rule("rope.llama3_waves", "The longest wave kept is longer than the shortest wave stretched.")
def llama3_waves(at: RuleContext) -> Iterator[Violation]:
    """The llama3 scaling blends between the two, and divides by their distance."""
    rope = at.spec.model.rope
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    if rope.scaling == "llama3" and not 0 < low < high:
        yield Violation(
            "model.rope.low_frequency_factor",
            f"low_frequency_factor {low:g} must lie between 0 and high_frequency_factor {high:g}",
            {"low_frequency_factor": low, "high_frequency_factor": high},
            (
                {"model.rope.low_frequency_factor": 1.0},
                {"model.rope.low_frequency_factor": 1.0, "model.rope.high_frequency_factor": 4.0},
            ),
        )


@rule("rope.yarn_betas", "The fast beta of yarn is above the slow one.")
def yarn_betas(at: RuleContext) -> Iterator[Violation]:
    """Between them the stretch rises from nothing to all."""
    rope = at.spec.model.rope
    if rope.scaling == "yarn" and not 0 < rope.beta_slow < rope.beta_fast:
        yield Violation(
            "model.rope.beta_fast",
            f"beta_slow {rope.beta_slow:g} must lie between 0 and beta_fast {rope.beta_fast:g}",
            {"beta_slow": rope.beta_slow, "beta_fast": rope.beta_fast},
            ({"model.rope.beta_fast": 32.0}, {"model.rope.beta_fast": 32.0, "model.rope.beta_slow": 1.0}),
        )


@rule("rope.yarn_reach", "A sequence is no longer than yarn stretches.")
def yarn_reach(at: RuleContext) -> Iterator[Violation]:
    """original_positions x factor is what it is made for."""
    rope, length = at.spec.model.rope, at.spec.batch.sequence_length
    if rope.scaling != "yarn" or rope.original_positions is None:
        return
    reach = _stretched(rope.original_positions, rope.factor)
    if length > reach:
        yield Violation(
            "batch.sequence_length",
            f"sequence_length {length} is longer than what yarn stretches to: "
            f"{rope.original_positions} x {rope.factor:g} = {reach}",
            {"sequence_length": length, "reach": reach},
            ({"batch.sequence_length": reach}, {"model.rope.factor": float(-(-length // rope.original_positions))}),
            severity="warning",
        )


register_inert(
    InertSetting(
        "rope.mscale_idle",
        "mscale_all_dim scales the softmax of latent attention.",
        "Ordinary attention has mscale.",
        ("model.rope.mscale_all_dim",),
        "model.mla.kv_lora_rank",
        lambda spec: spec.model.mla.kv_lora_rank is not None or spec.model.rope.scaling != "yarn",
        "there is no latent attention (model.mla.kv_lora_rank is null)",
    )
)


@rule("rope.mscale_whole_head", "Yarn's growth of the attention scale reaches the whole latent head.")
def mscale_whole_head(at: RuleContext) -> Iterator[Violation]:
    """mscale grows the rotated part alone; mscale_all_dim takes that back, and grows the softmax scale instead.

    Published models with latent attention give both the same value.
    """
    model, rope = at.spec.model, at.spec.model.rope
    uneven = model.mla.kv_lora_rank is not None and rope.scaling == "yarn" and rope.mscale != rope.mscale_all_dim
    if uneven:
        yield Violation(
            "model.rope.mscale_all_dim",
            f"mscale {rope.mscale:g} and mscale_all_dim {rope.mscale_all_dim:g} differ: "
            "the rotated part of a head is weighted unlike the rest of it",
            {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim},
            ({"model.rope.mscale_all_dim": rope.mscale}, {"model.rope.mscale": rope.mscale_all_dim}),
            severity="warning",
        )
