"""Llama 1 to 3.2, SmolLM2 and whatever else calls itself llama; also the words and names that later families share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megalaunch.config.schema.model import GATED, Activation, ModelSpec
from megalaunch.engine.families.config_file import ConfigFile
from megalaunch.engine.families.family import FamilyFile, Values, inverse
from megalaunch.engine.families.pairs import Pair, same
from megalaunch.engine.families.rope_keys import read_rope, write_rope

GATES: Mapping[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
# By block_norms: what our norms of a layer are called.
_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}


def read_shape(
    file: ConfigFile,
    *,
    epsilon: float = 1e-6,
    tied: bool = False,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    head_dim: int | None = None,
) -> Values:
    """The fields that all these families have, with a family's defaults where a file leaves a key out.

    `head_dim` is that of a family whose heads have a width of their own; the others derive it where it is null.
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
        "activation": file.choose(activation_key, GATES, activation),
        "tied_embeddings": file.flag("tie_word_embeddings", tied),
        "init_std": file.number("initializer_range", 0.02),
        "attention_dropout": file.rate("attention_dropout", 0.0),
    }


def read_biases(file: ConfigFile) -> Values:
    """`attention_bias` is that of all four projections."""
    attention = file.flag("attention_bias", False)
    return {"qkv_bias": attention, "attention_output_bias": attention}


def write_shape(model: ModelSpec, activation_key: str = "hidden_act") -> dict[str, Any]:
    """The same keys back."""
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
        activation_key: inverse(GATES).get(model.activation, "silu"),
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "attention_dropout": model.attention_dropout,
    }


def layer_names(model: ModelSpec, index: int) -> Iterator[Pair]:
    """Everything of one layer, each tensor by itself."""
    theirs, ours = f"model.layers.{index}.", f"layers.{index}."
    for projection in ("q_proj", "k_proj", "v_proj"):
        yield from linear(f"{theirs}self_attn.{projection}", f"{ours}attention.{projection}", model.qkv_bias)
    yield from linear(f"{theirs}self_attn.o_proj", f"{ours}attention.o_proj", model.attention_output_bias)
    if model.qk_norm != "none":
        for norm in ("q_norm", "k_norm"):
            yield same(f"{theirs}self_attn.{norm}.weight", f"{ours}attention.{norm}.weight")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        if projection != "gate_proj" or model.activation in GATED:
            yield from linear(f"{theirs}mlp.{projection}", f"{ours}mlp.{projection}", model.mlp_bias)
    yield from norm_names(model, index)


def norm_names(model: ModelSpec, index: int) -> Iterator[Pair]:
    """The norms around the blocks of a layer."""
    for ours, theirs in _NORMS[model.block_norms].items():
        yield same(f"model.layers.{index}.{theirs}.weight", f"layers.{index}.{ours}.weight")


def linear(theirs: str, ours: str, bias: bool) -> Iterator[Pair]:
    """Weight, and bias where there is one."""
    yield same(f"{theirs}.weight", f"{ours}.weight")
    if bias:
        yield same(f"{theirs}.bias", f"{ours}.bias")


def end_names(model: ModelSpec) -> Iterator[Pair]:
    """Embedding, last norm, and the head where it has a matrix of its own."""
    yield same("model.embed_tokens.weight", "embedding.weight")
    yield same("model.norm.weight", "norm.weight")
    if not model.tied_embeddings:
        yield same("lm_head.weight", "head.weight")


def tensors(model: ModelSpec) -> Iterator[Pair]:
    """The whole model."""
    yield from end_names(model)
    for index in range(model.num_layers):
        yield from layer_names(model, index)


def _read(file: ConfigFile) -> Values:
    bias = file.flag("mlp_bias", False)
    return read_shape(file) | read_biases(file) | {"mlp_bias": bias, "rope": read_rope(file)}


def _write(model: ModelSpec) -> dict[str, Any]:
    biases = {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    return write_shape(model) | biases | write_rope(model.rope)


FAMILY = FamilyFile("llama", "llama", "LlamaForCausalLM", _read, _write, tensors)
