"""Pythia and GPT-NeoX: parallel residual (attention and MLP read the same input), partial rotary embedding."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values, invert
from megalaunch.importers.huggingface.gpt import ACTIVATIONS
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


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
        "activation": file.pop_choice("hidden_act", ACTIVATIONS, "gelu"),
        "norm": "layernorm",
        "norm_epsilon": file.number("layer_norm_eps", 1e-5),
        "parallel_residual": file.flag("use_parallel_residual", True),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
        "hidden_dropout": file.rate("hidden_dropout", 0.0),
        "attention_dropout": file.rate("attention_dropout", 0.0),
        "tie_word_embeddings": file.flag("tie_word_embeddings", False),
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
        "hidden_act": invert(ACTIVATIONS).get(model.activation, "gelu"),
        "layer_norm_eps": model.norm_epsilon,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": model.qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.init_std,
        "rotary_pct": model.rope.fraction,
        "rotary_emb_base": model.rope.theta,
        "rope_scaling": rope["rope_scaling"],
    }


FAMILY = FamilySpec("gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", _read, _write)
