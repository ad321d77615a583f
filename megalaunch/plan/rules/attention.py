"""Rules of attention: sliding windows, soft caps, and latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule

register_inert(
    InertSetting(
        "attention.window_idle",
        "sliding_window_pattern is set only with a sliding window.",
        "Without a window every layer attends to all tokens.",
        ("model.sliding_window_pattern",),
        "model.sliding_window",
        lambda spec: spec.model.sliding_window is not None,
        "model.sliding_window is null, so every layer attends to all tokens",
    )
)


@rule("attention.scores_positive", "Soft caps and query_pre_attn_scalar are above 0.")
def scores_positive(at: RuleContext) -> Iterator[Violation]:
    """Scores and logits are divided by them."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        if getattr(at.spec.model, key) == 0:
            yield Violation(
                f"model.{key}",
                f"{key} 0 causes a division by 0",
                {key: 0.0},
                ({f"model.{key}": None}, {f"model.{key}": 50.0}),
            )


@rule("attention.window_everywhere_full", "Some layer has the sliding window.")
def window_everywhere_full(at: RuleContext) -> Iterator[Violation]:
    """With sliding_window_pattern 1 no layer has it."""
    model = at.spec.model
    if model.sliding_window is not None and model.sliding_window_pattern == 1:
        yield Violation(
            "model.sliding_window",
            f"sliding_window {model.sliding_window} is not used: every layer attends to all tokens "
            "(sliding_window_pattern 1)",
            {"sliding_window": model.sliding_window},
            (
                {"model.sliding_window_pattern": 2},
                {"model.sliding_window_pattern": None},
                {"model.sliding_window": None, "model.sliding_window_pattern": None},
            ),
            severity="warning",
        )


@rule("attention.window_never_full", "sliding_window_pattern is at most the number of layers.")
def window_never_full(at: RuleContext) -> Iterator[Violation]:
    """Every n-th layer attends to all tokens."""
    model, every = at.spec.model, at.spec.model.sliding_window_pattern
    if model.sliding_window is not None and every is not None and every > model.num_layers:
        yield Violation(
            "model.sliding_window_pattern",
            f"sliding_window_pattern {every} is above num_layers {model.num_layers}: every layer has the window",
            {"sliding_window_pattern": every, "num_layers": model.num_layers},
            ({"model.sliding_window_pattern": None}, {"model.sliding_window_pattern": min(2, model.num_layers)}),
            severity="warning",
        )


@rule("attention.window_spans_sequence", "The sliding window is shorter than the sequence.")
def window_spans_sequence(at: RuleContext) -> Iterator[Violation]:
    """A longer window masks nothing, which is right for a published model on short samples."""
    window, length = at.spec.model.sliding_window, at.spec.batch.sequence_length
    if window is not None and window >= length:
        yield Violation(
            "model.sliding_window",
            f"sliding_window {window} masks nothing in sequences of {length}",
            {"sliding_window": window, "sequence_length": length},
            ({"model.sliding_window": None, "model.sliding_window_pattern": None},),
            severity="note",
        )


@rule("mla.groups", "With latent attention num_query_groups equals num_attention_heads.")
def latent_groups(at: RuleContext) -> Iterator[Violation]:
    """Every query head has its own keys and values, projected from the latent, which saves more than grouping."""
    model = at.spec.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.mla.kv_lora_rank is not None and groups is not None and groups != heads:
        yield Violation(
            "model.num_query_groups",
            f"latent attention has as many key/value heads as query heads, {heads}, but num_query_groups is {groups}",
            {"num_query_groups": groups, "num_attention_heads": heads},
            ({"model.num_query_groups": heads}, {"model.mla.kv_lora_rank": None, "model.head_dim": None}),
        )


@rule("mla.positions", "Latent attention uses RoPE.")
def latent_positions(at: RuleContext) -> Iterator[Violation]:
    """RoPE rotates mla.qk_rope_head_dim dimensions of every head."""
    model = at.spec.model
    if model.mla.kv_lora_rank is not None and model.position_embedding != "rope":
        yield Violation(
            "model.position_embedding",
            f"latent attention needs position_embedding=rope, but it is {model.position_embedding}",
            fixes=({"model.position_embedding": "rope"},),
        )


@rule("mla.rotary_even", "qk_rope_head_dim is even.")
def latent_rotary_even(at: RuleContext) -> Iterator[Violation]:
    """RoPE rotates pairs of dimensions."""
    mla = at.spec.model.mla
    if mla.kv_lora_rank is not None and mla.qk_rope_head_dim % 2:
        width = mla.qk_rope_head_dim
        yield Violation(
            "model.mla.qk_rope_head_dim",
            f"qk_rope_head_dim {width} is odd, but RoPE rotates pairs",
            {"qk_rope_head_dim": width},
            ({"model.mla.qk_rope_head_dim": width + 1}, {"model.mla.qk_rope_head_dim": max(2, width - 1)}),
        )


@rule("mla.fraction", "With latent attention rope.fraction is 1.")
def latent_fraction(at: RuleContext) -> Iterator[Violation]:
    """mla.qk_rope_head_dim already sets how many dimensions are rotated."""
    model = at.spec.model
    if model.mla.kv_lora_rank is not None and model.rope.fraction != 1:
        yield Violation(
            "model.rope.fraction",
            f"latent attention rotates mla.qk_rope_head_dim of each head, but rope.fraction is {model.rope.fraction:g}",
            {"fraction": model.rope.fraction},
            ({"model.rope.fraction": 1.0},),
        )


@rule("mla.head_dim", "With latent attention head_dim is qk_nope_head_dim + qk_rope_head_dim.")
def latent_head_dim(at: RuleContext) -> Iterator[Violation]:
    """A head consists of these two parts."""
    model, mla = at.spec.model, at.spec.model.mla
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if mla.kv_lora_rank is not None and model.head_dim is not None and model.head_dim != width:
        yield Violation(
            "model.head_dim",
            f"head_dim {model.head_dim} is not qk_nope_head_dim {mla.qk_nope_head_dim} + "
            f"qk_rope_head_dim {mla.qk_rope_head_dim} of latent attention",
            {"head_dim": model.head_dim, "qk_nope_head_dim": mla.qk_nope_head_dim},
            ({"model.head_dim": None},),
        )


@rule("mla.plain", "Latent attention has no biases, sliding window, sinks, output gate or QK norm.")
def latent_plain(at: RuleContext) -> Iterator[Violation]:
    """Latent attention defines none of them, and Megatron-LM refuses them too. Its latents are always normalised."""
    if at.spec.model.mla.kv_lora_rank is None:
        return
    plain = {
        "qkv_bias": False,
        "attention_output_bias": False,
        "sliding_window": None,
        "attention_sinks": False,
        "attention_output_gate": False,
        "qk_norm": "none",
    }
    for key, value in plain.items():
        given = getattr(at.spec.model, key)
        if given != value:
            pattern: Fix = {"model.sliding_window_pattern": None} if key == "sliding_window" else {}
            yield Violation(
                f"model.{key}",
                f"{key}={str(given).lower()} is not defined for latent attention",
                {key: given},
                ({f"model.{key}": value, **pattern},),
            )


@rule("mla.narrow", "The key/value latent is narrower than the keys and values.")
def latent_narrow(at: RuleContext) -> Iterator[Violation]:
    """A wider latent costs more than ordinary attention and saves no memory."""
    model, mla = at.spec.model, at.spec.model.mla
    full = model.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if mla.kv_lora_rank is not None and mla.kv_lora_rank >= full:
        yield Violation(
            "model.mla.kv_lora_rank",
            f"kv_lora_rank {mla.kv_lora_rank} is not below the width of the keys and values of "
            f"{model.num_attention_heads} heads, {full}",
            {"kv_lora_rank": mla.kv_lora_rank, "keys_and_values": full},
            ({"model.mla.kv_lora_rank": max(1, full // 8)}, {"model.mla.kv_lora_rank": max(1, full // 2)}),
            severity="warning",
        )


register_inert(
    InertSetting(
        "mla.idle",
        "model.mla is set only with latent attention.",
        "mla.kv_lora_rank enables it.",
        ("model.mla.",),
        "model.mla.kv_lora_rank",
        lambda spec: spec.model.mla.kv_lora_rank is not None,
        "latent attention is off (model.mla.kv_lora_rank is null)",
    )
)
