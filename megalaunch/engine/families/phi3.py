"""Phi-3 and Phi-4: queries, keys and values in one matrix, gate and up in another."""

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
    dropout = file.rate("resid_pdrop", 0.0)
    file.ignore("embd_pdrop", "Phi-3 of transformers drops nothing there")
    shape = read_shape(file, epsilon=1e-5) | {"sliding_window": file.integer("sliding_window", None, null=None)}
    own = {"hidden_dropout": dropout, "embedding_dropout": 0.0}
    return shape | own | {"rope": read_rope(file, fraction=1.0, scalings=("longrope",), original=4096)}


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {
        "sliding_window": model.sliding_window,
        "partial_rotary_factor": model.rope.fraction,
        "original_max_position_embeddings": model.rope.original_positions or model.max_position_embeddings,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": 0.0,
    }
    return write_shape(model) | own | _write_rope(model)


def _write_rope(model: ModelSpec) -> dict[str, Any]:
    """Older transformers take three keys of a scaling only, and derive the factor from the two lengths."""
    rope = write_rope(model.rope)
    scaling = rope["rope_scaling"]
    if scaling is not None and model.rope.scaling == "longrope":
        del scaling["original_max_position_embeddings"]
        scaling["type"] = scaling.pop("rope_type")
        if scaling["factor"] == model.max_position_embeddings / (model.rope.original_positions or 1):
            del scaling["factor"]
    return rope


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
