"""Widths of attention's tensors on one tensor-parallel rank."""

from __future__ import annotations

from megalaunch.schema.model import ModelSpec


def local_heads_and_groups(model: ModelSpec, tp: int) -> tuple[float, float]:
    """Return the query heads of a rank, and its groups of keys and values, which ranks share if there are fewer."""
    heads = model.num_attention_heads
    return heads / tp, max(1.0, (model.num_query_groups or heads) / tp)


def attention_widths(model: ModelSpec, tp: int) -> tuple[float, float, float, float]:
    """Return the widths of queries, keys, values and output."""
    (heads, groups), mla, head_dim = local_heads_and_groups(model, tp), model.mla, model.head_dim or 0
    if mla.kv_lora_rank is None:
        return heads * head_dim, groups * head_dim, groups * head_dim, heads * head_dim
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return query, query, heads * mla.v_head_dim, heads * mla.v_head_dim
