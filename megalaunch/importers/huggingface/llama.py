"""Llama 1 to 3.2, SmolLM2 and other models of type llama; also the keys that later families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values, invert
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import Activation, ModelSpec

GATES: Mapping[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}


def read_common(
    file: ConfigFile,
    *,
    epsilon: float = 1e-6,
    tied: bool = False,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    head_dim: int | None = None,
) -> Values:
    """Read the fields that Llama-like families share.

    Args:
        file: the config.json.
        epsilon: the family's default rms_norm_eps.
        tied: the family's default tie_word_embeddings.
        activation_key: the key of the activation.
        activation: its default.
        head_dim: default head width of a family that sets it; None: hidden_size / num_attention_heads.
    """
    hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    derived = (hidden or 0) // (heads or 1) or None
    width = file.integer("head_dim", head_dim) if head_dim else file.integer("head_dim", derived, null=derived)
    return {
        "num_layers": file.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": file.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": file.integer("num_key_value_heads", heads, null=heads),
        "head_dim": width,
        "vocab_size": file.integer("vocab_size"),
        "max_position_embeddings": file.integer("max_position_embeddings", 2048),
        "norm_epsilon": file.number("rms_norm_eps", epsilon),
        "activation": file.pop_choice(activation_key, GATES, activation),
        "tie_word_embeddings": file.flag("tie_word_embeddings", tied),
        "init_std": file.number("initializer_range", 0.02),
        "attention_dropout": file.rate("attention_dropout", 0.0),
    }


def read_biases(file: ConfigFile) -> Values:
    """Read `attention_bias`, which applies to all four projections."""
    attention = file.flag("attention_bias", False)
    return {"qkv_bias": attention, "attention_output_bias": attention}


def write_common(model: ModelSpec, activation_key: str = "hidden_act") -> dict[str, Any]:
    """Write the keys of `read_common`."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        activation_key: invert(GATES).get(model.activation, "silu"),
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.init_std,
        "attention_dropout": model.attention_dropout,
    }


def _read(file: ConfigFile) -> Values:
    bias = file.flag("mlp_bias", False)
    return read_common(file) | read_biases(file) | {"mlp_bias": bias, "rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    biases = {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    return write_common(model) | biases | write_rope(model.rope)


FAMILY = FamilySpec("llama", "llama", "LlamaForCausalLM", _read, _write)
