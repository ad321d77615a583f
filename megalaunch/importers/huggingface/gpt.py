"""GPT-2 and GPT-3: learned position embeddings, LayerNorm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values, invert
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.schema.model import Activation, ModelSpec

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}


def _read(file: ConfigFile) -> Values:
    hidden, heads = file.integer("n_embd", 768), file.integer("n_head", 12)
    file.expect("scale_attn_weights", True)
    file.expect("scale_attn_by_inverse_layer_idx", False)
    return {
        "num_layers": file.integer("n_layer", 12),
        "hidden_size": hidden,
        "ffn_hidden_size": file.integer("n_inner", 4 * (hidden or 0), null=4 * (hidden or 0)),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "head_dim": (hidden or 0) // (heads or 1),
        "vocab_size": file.integer("vocab_size", 50257),
        "max_position_embeddings": file.integer("n_positions", 1024),
        "position_embedding": "learned",
        "activation": file.pop_choice("activation_function", ACTIVATIONS, "gelu_new"),
        "norm": "layernorm",
        "norm_epsilon": file.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "hidden_dropout": file.rate("resid_pdrop", 0.1),
        "embedding_dropout": file.rate("embd_pdrop", 0.1),
        "attention_dropout": file.rate("attn_pdrop", 0.1),
        "tie_word_embeddings": file.flag("tie_word_embeddings", True),
        "init_std": file.number("initializer_range", 0.02),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_hidden_size,
        "n_head": model.num_attention_heads,
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "activation_function": invert(ACTIVATIONS).get(model.activation, "gelu_new"),
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout if model.embedding_dropout is None else model.embedding_dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.init_std,
    }


FAMILY = FamilySpec("gpt", "gpt2", "GPT2LMHeadModel", _read, _write)
