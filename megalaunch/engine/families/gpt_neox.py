"""Pythia and GPT-NeoX: both blocks read the same stream, a part of each head is rotated, queries lie by head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.config_file import ConfigFile
from megalaunch.engine.families.family import FamilyFile, Values, inverse
from megalaunch.engine.families.gpt import PLAIN, both
from megalaunch.engine.families.pairs import Pair, dealt_by_head, same
from megalaunch.engine.families.rope_keys import read_rope, write_rope


def _read(file: ConfigFile) -> Values:
    hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    bias = file.flag("attention_bias", True)
    fraction = file.number("rotary_pct", 0.25)
    return {
        "num_layers": file.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": file.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "head_dim": (hidden or 0) // (heads or 1),
        "vocab_size": file.integer("vocab_size"),
        "max_position_embeddings": file.integer("max_position_embeddings", 2048),
        "activation": file.choose("hidden_act", PLAIN, "gelu"),
        "norm": "layernorm",
        "norm_epsilon": file.number("layer_norm_eps", 1e-5),
        "parallel_residual": file.flag("use_parallel_residual", True),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
        "hidden_dropout": file.rate("hidden_dropout", 0.0),
        "attention_dropout": file.rate("attention_dropout", 0.0),
        "tied_embeddings": file.flag("tie_word_embeddings", False),
        "init_std": file.number("initializer_range", 0.02),
        "rope": read_rope(file, file.number("rotary_emb_base", 10000.0), fraction),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    rope = write_rope(model.rope)
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": inverse(PLAIN).get(model.activation, "gelu"),
        "layer_norm_eps": model.norm_epsilon,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": model.qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "rotary_pct": model.rope.fraction,
        "rotary_emb_base": model.rope.theta,
        "rope_scaling": rope["rope_scaling"],
    }


def _tensors(model: ModelSpec) -> Iterator[Pair]:
    yield same("gpt_neox.embed_in.weight", "embedding.weight")
    yield from both("gpt_neox.final_layer_norm", "norm")
    if not model.tied_embeddings:
        yield same("embed_out.weight", "head.weight")
    for index in range(model.num_layers):
        theirs, ours = f"gpt_neox.layers.{index}.", f"layers.{index}."
        yield from both(f"{theirs}input_layernorm", f"{ours}attention_norm")
        yield from both(f"{theirs}post_attention_layernorm", f"{ours}mlp_norm")
        for part in ("weight", "bias") if model.qkv_bias else ("weight",):
            names = [f"{ours}attention.{name}_proj.{part}" for name in "qkv"]
            yield dealt_by_head(f"{theirs}attention.query_key_value.{part}", names, model.num_attention_heads)
            yield same(f"{theirs}attention.dense.{part}", f"{ours}attention.o_proj.{part}")
        yield from both(f"{theirs}mlp.dense_h_to_4h", f"{ours}mlp.up_proj")
        yield from both(f"{theirs}mlp.dense_4h_to_h", f"{ours}mlp.down_proj")


FAMILY = FamilyFile(
    "gpt_neox",
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _read,
    _write,
    _tensors,
    dropped=(".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
)
