"""Llama 1 to 3.2, SmolLM2 and whatever else calls itself llama: names of tensors, which most later families share."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.config.schema.model import GATED, ModelSpec
from megalaunch.engine.families.family import FamilyWeights
from megalaunch.engine.families.pairs import Pair, same

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


WEIGHTS = FamilyWeights(tensors)
