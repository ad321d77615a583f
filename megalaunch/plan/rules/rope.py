"""Rules of RoPE and of its scaling beyond the original context length."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule

register_inert(
    InertSetting(
        "rope.idle",
        "model.rope is set only with RoPE.",
        "Other position embeddings do not read it.",
        ("model.rope.",),
        "model.position_embedding",
        lambda spec: spec.model.position_embedding == "rope",
        "model.position_embedding is not rope",
    )
)
register_inert(
    InertSetting(
        "rope.never_idle",
        "no_rope_layer_interval is set only with RoPE.",
        "With other position embeddings no layer has RoPE.",
        ("model.no_rope_layer_interval",),
        "model.position_embedding",
        lambda spec: spec.model.position_embedding == "rope",
        "model.position_embedding is not rope",
    )
)
register_inert(
    InertSetting(
        "rope.window_idle",
        "rope.window_theta is set only with a sliding window.",
        "Without a window there are no windowed layers.",
        ("model.rope.window_theta",),
        "model.sliding_window",
        lambda spec: spec.model.sliding_window is not None,
        "model.sliding_window is null, so every layer attends to all tokens",
    )
)
register_inert(
    InertSetting(
        "rope.factor_idle",
        "rope.factor is set only with RoPE scaling.",
        "rope.scaling selects the method.",
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
        "rope.original_positions is set only for llama3, yarn and longrope.",
        "They scale frequencies by the rotations within the original context; scaling none ignores the value.",
        ("model.rope.original_positions",),
        "model.rope.scaling",
        lambda spec: spec.model.rope.scaling != "linear",
        "model.rope.scaling is linear",
    )
)
register_inert(
    InertSetting(
        "rope.llama3_idle",
        "The frequency factors are set only for llama3 scaling.",
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
        "short_factors and long_factors are set only for longrope scaling.",
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
        "rope.attention_factor is set only for yarn and longrope scaling.",
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
        "The betas, mscale and truncate are set only for yarn scaling.",
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


@rule("rope.rotated_width", "The rotated part of a head has an even width of at least 2.")
def rotated_width(at: RuleContext) -> Iterator[Violation]:
    """RoPE rotates pairs of dimensions, in rope.fraction of the head."""
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
        f"fraction {fraction:g} of head_dim {model.head_dim} is {has}, but RoPE rotates pairs",
        {"fraction": fraction, "head_dim": model.head_dim},
        (*fixes, {"model.rope.fraction": 1.0}),
    )


@rule("rope.factor_one", "With RoPE scaling rope.factor is above 1.")
def factor_one(at: RuleContext) -> Iterator[Violation]:
    """A factor of 1 changes nothing."""
    model, rope = at.spec.model, at.spec.model.rope
    if model.position_embedding == "rope" and rope.scaling != "none" and rope.factor == 1:
        yield Violation(
            "model.rope.factor",
            f"scaling {rope.scaling} by a factor of 1 changes nothing",
            {"factor": 1.0},
            (
                {"model.rope.factor": 8.0},
                {"model.rope.scaling": "none"},
                {"model.rope.scaling": "none", "model.rope.original_positions": None},
            ),
            severity="warning",
        )


@rule("rope.longrope_factors", "Each rotated pair of a head has a short and a long factor.")
def longrope_factors(at: RuleContext) -> Iterator[Violation]:
    """Its frequency is divided by one of them, depending on the sequence length."""
    model, rope = at.spec.model, at.spec.model.rope
    if rope.scaling != "longrope" or model.head_dim is None:
        return
    pairs = round(model.head_dim * rope.fraction) // 2
    for key in ("short_factors", "long_factors"):
        factors = getattr(rope, key)
        if len(factors) != pairs or not all(factors):
            yield Violation(
                f"model.rope.{key}",
                f"longrope needs a factor above 0 for each of {pairs} rotated pairs, but {key} has {len(factors)}",
                {"pairs": pairs, key: len(factors)},
                ({"model.rope.scaling": "none", "model.rope.short_factors": (), "model.rope.long_factors": ()},),
            )


@rule("rope.original_missing", "rope.original_positions is given for llama3, yarn and longrope.")
def original_missing(at: RuleContext) -> Iterator[Violation]:
    """It decides which frequencies are scaled."""
    model, rope = at.spec.model, at.spec.model.rope
    if rope.scaling in ("llama3", "yarn", "longrope") and rope.original_positions is None:
        guess = max(1, _shrunk(model.max_position_embeddings, rope.factor))
        yield Violation(
            "model.rope.original_positions",
            f"scaling {rope.scaling} needs original_positions, the context length before scaling",
            {"max_position_embeddings": model.max_position_embeddings, "factor": rope.factor},
            ({"model.rope.original_positions": guess}, {"model.rope.original_positions": 8192}),
        )


@rule("rope.original_longer", "rope.original_positions is at most max_position_embeddings.")
def original_longer(at: RuleContext) -> Iterator[Violation]:
    """max_position_embeddings is the context length after scaling."""
    model, rope = at.spec.model, at.spec.model.rope
    original, longest = rope.original_positions, model.max_position_embeddings
    if rope.scaling in ("llama3", "yarn", "longrope") and original is not None and original > longest:
        yield Violation(
            "model.rope.original_positions",
            f"original_positions {original} is above max_position_embeddings {longest}, the length after scaling",
            {"original_positions": original, "max_position_embeddings": longest},
            (
                {"model.max_position_embeddings": _stretched(original, rope.factor)},
                {"model.rope.original_positions": longest},
            ),
            severity="warning",
        )


@rule("rope.llama3_waves", "low_frequency_factor is above 0 and below high_frequency_factor.")
def llama3_waves(at: RuleContext) -> Iterator[Violation]:
    """llama3 scaling interpolates between the two, and divides by their difference."""
    rope = at.spec.model.rope
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    if rope.scaling == "llama3" and not 0 < low < high:
        yield Violation(
            "model.rope.low_frequency_factor",
            f"low_frequency_factor {low:g} must be between 0 and high_frequency_factor {high:g}",
            {"low_frequency_factor": low, "high_frequency_factor": high},
            (
                {"model.rope.low_frequency_factor": 1.0},
                {"model.rope.low_frequency_factor": 1.0, "model.rope.high_frequency_factor": 4.0},
            ),
        )


@rule("rope.yarn_betas", "beta_slow is above 0 and below beta_fast.")
def yarn_betas(at: RuleContext) -> Iterator[Violation]:
    """Between them yarn interpolates from no scaling to full scaling."""
    rope = at.spec.model.rope
    if rope.scaling == "yarn" and not 0 < rope.beta_slow < rope.beta_fast:
        yield Violation(
            "model.rope.beta_fast",
            f"beta_slow {rope.beta_slow:g} must be between 0 and beta_fast {rope.beta_fast:g}",
            {"beta_slow": rope.beta_slow, "beta_fast": rope.beta_fast},
            ({"model.rope.beta_fast": 32.0}, {"model.rope.beta_fast": 32.0, "model.rope.beta_slow": 1.0}),
        )


@rule("rope.yarn_reach", "sequence_length is at most original_positions x factor of yarn.")
def yarn_reach(at: RuleContext) -> Iterator[Violation]:
    """Yarn scales the context to this length."""
    rope, length = at.spec.model.rope, at.spec.batch.sequence_length
    if rope.scaling != "yarn" or rope.original_positions is None:
        return
    reach = _stretched(rope.original_positions, rope.factor)
    if length > reach:
        yield Violation(
            "batch.sequence_length",
            f"sequence_length {length} is above the context length of yarn: "
            f"{rope.original_positions} x {rope.factor:g} = {reach}",
            {"sequence_length": length, "reach": reach},
            ({"batch.sequence_length": reach}, {"model.rope.factor": float(-(-length // rope.original_positions))}),
            severity="warning",
        )


register_inert(
    InertSetting(
        "rope.mscale_idle",
        "mscale_all_dim is set only for latent attention.",
        "It scales the softmax of latent attention; ordinary attention has mscale.",
        ("model.rope.mscale_all_dim",),
        "model.mla.kv_lora_rank",
        lambda spec: spec.model.mla.kv_lora_rank is not None or spec.model.rope.scaling != "yarn",
        "there is no latent attention (model.mla.kv_lora_rank is null)",
    )
)


@rule("rope.mscale_whole_head", "With latent attention mscale equals mscale_all_dim.")
def mscale_whole_head(at: RuleContext) -> Iterator[Violation]:
    """mscale scales the rotated part alone; mscale_all_dim undoes that and scales the softmax instead."""
    model, rope = at.spec.model, at.spec.model.rope
    uneven = model.mla.kv_lora_rank is not None and rope.scaling == "yarn" and rope.mscale != rope.mscale_all_dim
    if uneven:
        yield Violation(
            "model.rope.mscale_all_dim",
            f"mscale {rope.mscale:g} and mscale_all_dim {rope.mscale_all_dim:g} differ: "
            "the rotated part of a head is scaled unlike the rest",
            {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim},
            ({"model.rope.mscale_all_dim": rope.mscale}, {"model.rope.mscale": rope.mscale_all_dim}),
            severity="warning",
        )
