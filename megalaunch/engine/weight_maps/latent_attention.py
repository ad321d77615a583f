"""Latent attention of DeepSeek-V2, DeepSeek-V3 and Moonlight: tensor names, and the order of rotated rows."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.engine.weight_maps.weight_mapping import WeightMapping, rename, rope_pairs_to_halves
from megalaunch.schema.model import ModelSpec


def latent_attention_mapping(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map the attention of one layer; `theirs` and `ours` are the prefixes of its names."""
    heads, rotated = model.num_attention_heads, model.mla.qk_rope_head_dim
    if model.mla.q_lora_rank is None:
        yield rope_pairs_to_halves(f"{theirs}q_proj.weight", f"{ours}q_proj.weight", heads, rotated)
    else:
        yield rename(f"{theirs}q_a_proj.weight", f"{ours}q_a_proj.weight")
        yield rename(f"{theirs}q_a_layernorm.weight", f"{ours}q_a_norm.weight")
        yield rope_pairs_to_halves(f"{theirs}q_b_proj.weight", f"{ours}q_b_proj.weight", heads, rotated)
    yield rope_pairs_to_halves(f"{theirs}kv_a_proj_with_mqa.weight", f"{ours}kv_a_proj.weight", 1, rotated)
    yield rename(f"{theirs}kv_a_layernorm.weight", f"{ours}kv_a_norm.weight")
    yield rename(f"{theirs}kv_b_proj.weight", f"{ours}kv_b_proj.weight")
    yield rename(f"{theirs}o_proj.weight", f"{ours}o_proj.weight")
