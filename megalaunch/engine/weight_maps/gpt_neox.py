"""Pythia and GPT-NeoX: one fused QKV matrix, interleaved by head."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.engine.weight_maps.gpt import both
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping, interleave_heads, rename
from megalaunch.schema.model import ModelSpec


def _tensors(model: ModelSpec) -> Iterator[WeightMapping]:
    yield rename("gpt_neox.embed_in.weight", "embedding.weight")
    yield from both("gpt_neox.final_layer_norm", "norm")
    if not model.tie_word_embeddings:
        yield rename("embed_out.weight", "head.weight")
    for index in range(model.num_layers):
        theirs, ours = f"gpt_neox.layers.{index}.", f"layers.{index}."
        yield from both(f"{theirs}input_layernorm", f"{ours}attention_norm")
        yield from both(f"{theirs}post_attention_layernorm", f"{ours}mlp_norm")
        for part in ("weight", "bias") if model.qkv_bias else ("weight",):
            names = [f"{ours}attention.{name}_proj.{part}" for name in "qkv"]
            yield interleave_heads(f"{theirs}attention.query_key_value.{part}", names, model.num_attention_heads)
            yield rename(f"{theirs}attention.dense.{part}", f"{ours}attention.o_proj.{part}")
        yield from both(f"{theirs}mlp.dense_h_to_4h", f"{ours}mlp.up_proj")
        yield from both(f"{theirs}mlp.dense_4h_to_h", f"{ours}mlp.down_proj")


WEIGHTS = FamilyWeights(_tensors, dropped=(".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"))
