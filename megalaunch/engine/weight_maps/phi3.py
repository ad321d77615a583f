"""Phi-3 and Phi-4: fused QKV, and fused gate and up projections."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.engine.weight_maps.llama import embedding_and_head_mapping, norm_mapping
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping, concat_rows, rename
from megalaunch.schema.model import ModelSpec


def _tensors(model: ModelSpec) -> Iterator[WeightMapping]:
    yield from embedding_and_head_mapping(model)
    head, width = model.head_dim or 0, model.ffn_hidden_size
    keys = head * (model.num_query_groups or model.num_attention_heads)
    for index in range(model.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        projections = [f"{ours}attention.{name}_proj.weight" for name in "qkv"]
        yield concat_rows(
            f"{theirs}self_attn.qkv_proj.weight", projections, (head * model.num_attention_heads, keys, keys)
        )
        yield rename(f"{theirs}self_attn.o_proj.weight", f"{ours}attention.o_proj.weight")
        entries = [f"{ours}mlp.{name}_proj.weight" for name in ("gate", "up")]
        yield concat_rows(f"{theirs}mlp.gate_up_proj.weight", entries, (width, width))
        yield rename(f"{theirs}mlp.down_proj.weight", f"{ours}mlp.down_proj.weight")
        yield from norm_mapping(model, theirs, ours)


WEIGHTS = FamilyWeights(_tensors)
