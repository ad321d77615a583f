"""Phi-3 with its short context: queries, keys and values in one matrix, gate and up in another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.config_file import ConfigFile
from megalaunch.engine.families.family import FamilyFile, Values
from megalaunch.engine.families.llama import end_names, norm_names, read_shape, write_shape
from megalaunch.engine.families.pairs import Pair, fused, same
from megalaunch.engine.families.rope_keys import read_rope, write_rope


def _read(file: ConfigFile) -> Values:
    dropout = file.take("resid_pdrop", 0.0)
    file.expect("embd_pdrop", 0.0)
    file.take("original_max_position_embeddings", None)  # means something to long contexts only, which are refused
    shape = read_shape(file, epsilon=1e-5) | {"sliding_window": file.integer("sliding_window", None)}
    fraction = {"fraction": float(file.take("partial_rotary_factor", 1.0))}
    return shape | {"hidden_dropout": float(dropout), "rope": fraction | read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {
        "sliding_window": model.sliding_window,
        "partial_rotary_factor": model.rope.fraction,
        "original_max_position_embeddings": model.max_position_embeddings,
        "resid_pdrop": model.hidden_dropout,
    }
    return write_shape(model) | own | write_rope(model.rope)


def _tensors(model: ModelSpec) -> Iterator[Pair]:
    yield from end_names(model)
    head, width = model.head_dim or 0, model.ffn_hidden_size
    keys = head * (model.num_query_groups or model.num_attention_heads)
    for index in range(model.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        projections = [f"{ours}attention.{name}_proj.weight" for name in "qkv"]
        yield fused(f"{theirs}self_attn.qkv_proj.weight", projections, (head * model.num_attention_heads, keys, keys))
        yield same(f"{theirs}self_attn.o_proj.weight", f"{ours}attention.o_proj.weight")
        entries = [f"{ours}mlp.{name}_proj.weight" for name in ("gate", "up")]
        yield fused(f"{theirs}mlp.gate_up_proj.weight", entries, (width, width))
        yield same(f"{theirs}mlp.down_proj.weight", f"{ours}mlp.down_proj.weight")
        yield from norm_names(model, index)


FAMILY = FamilyFile("phi3", "phi3", "Phi3ForCausalLM", _read, _write, _tensors)
