"""Llama 1 to 3.2, SmolLM2 and other models of type llama: tensor names, which most later families share."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping, rename
from megalaunch.schema.model import GATED, ModelSpec

# By norm_placement: the decoder's norm names and Hugging Face's.
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


def attention_mapping(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map the attention of one layer; `theirs` and `ours` are the prefixes of the layer's names."""
    for projection in ("q_proj", "k_proj", "v_proj"):
        yield from linear(f"{theirs}self_attn.{projection}", f"{ours}attention.{projection}", model.qkv_bias)
    yield from linear(f"{theirs}self_attn.o_proj", f"{ours}attention.o_proj", model.attention_output_bias)
    if model.qk_norm != "none":
        for norm in ("q_norm", "k_norm"):
            yield rename(f"{theirs}self_attn.{norm}.weight", f"{ours}attention.{norm}.weight")


def mlp_mapping(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map a feed-forward block; `theirs` and `ours` are the prefixes of its names."""
    for projection in ("gate_proj", "up_proj", "down_proj"):
        if projection != "gate_proj" or model.activation in GATED:
            yield from linear(f"{theirs}{projection}", f"{ours}{projection}", model.mlp_bias)


def norm_mapping(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map the norms of one layer."""
    for our_norm, their_norm in _NORMS[model.norm_placement].items():
        yield rename(f"{theirs}{their_norm}.weight", f"{ours}{our_norm}.weight")


def linear(theirs: str, ours: str, bias: bool) -> Iterator[WeightMapping]:
    """Map a linear layer: the weight, and the bias if there is one."""
    yield rename(f"{theirs}.weight", f"{ours}.weight")
    if bias:
        yield rename(f"{theirs}.bias", f"{ours}.bias")


def embedding_and_head_mapping(model: ModelSpec) -> Iterator[WeightMapping]:
    """Map the embedding, the final norm, and the head if it is not tied."""
    yield rename("model.embed_tokens.weight", "embedding.weight")
    yield rename("model.norm.weight", "norm.weight")
    if not model.tie_word_embeddings:
        yield rename("lm_head.weight", "head.weight")


def tensors(model: ModelSpec) -> Iterator[WeightMapping]:
    """Map all tensors of the model."""
    yield from embedding_and_head_mapping(model)
    for index in range(model.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        yield from attention_mapping(model, theirs, ours)
        yield from mlp_mapping(model, f"{theirs}mlp.", f"{ours}mlp.")
        yield from norm_mapping(model, theirs, ours)


WEIGHTS = FamilyWeights(tensors)
