"""Model FLOPs of a training step, counted as in Megatron-LM.

A multiply-add is 2 FLOPs, and forward and backward are 3 passes: 6 FLOPs per weight and token. Norms, routers, the
embedding look-up and recomputation are not counted; a sliding window is counted as full attention.
"""

from __future__ import annotations

from functools import lru_cache

from megalaunch.plan.layers import list_layers
from megalaunch.plan.parameters import check_resolved
from megalaunch.schema import RunSpec
from megalaunch.schema.model import GATED, ModelSpec


def step_flops(spec: RunSpec, *, full_attention: bool = False) -> int:
    """Return the model FLOPs of one optimizer step over all devices, of a resolved spec.

    Equals `num_floating_point_operations` of Megatron-LM since March 2025: attention counts only what the causal mask
    keeps. With `full_attention` non-causal attention is counted, as in most published MFU figures.

    Raises:
        ValueError: a dimension of the model is open.
    """
    tokens = spec.batch.global_batch_size * spec.batch.sequence_length
    return sequence_flops(spec.model, tokens, spec.batch.sequence_length, full_attention=full_attention)


def flops_per_token(spec: RunSpec, *, full_attention: bool = False) -> float:
    """Return the model FLOPs of one trained token."""
    tokens = spec.batch.global_batch_size * spec.batch.sequence_length
    return step_flops(spec, full_attention=full_attention) / tokens


def sequence_flops(model: ModelSpec, tokens: int, sequence_length: int, *, full_attention: bool = False) -> int:
    """Return the model FLOPs of `tokens` in sequences of one length; raises ValueError while a dimension is open."""
    _, _, vocab = check_resolved(model)
    layers = list_layers(model)
    depths = model.mtp.num_layers
    attention = len(layers) * attention_weights(model)
    core = len(layers) * core_widths(model) * sequence_length  # scores and values, non-causal
    feed_forward = sum(mlp_weights(model, experts=layer.experts) for layer in layers)
    logits = model.hidden_size * vocab * (1 + depths)
    further = depths * (3 * model.hidden_size + 2 * model.hidden_size**2)  # Megatron includes the three norms here
    weights = attention + feed_forward + logits + further
    return 6 * tokens * weights + (6 if full_attention else 3) * tokens * core  # a causal mask keeps half of it


@lru_cache(maxsize=64)
def attention_weights(model: ModelSpec) -> int:
    """Return the weights of one layer's attention that multiply each token."""
    head_dim, groups, _ = check_resolved(model)
    heads, hidden, mla = model.num_attention_heads, model.hidden_size, model.mla
    if mla.kv_lora_rank is None:
        queries = heads * head_dim
        gates = queries if model.attention_output_gate else 0
        return hidden * (queries + gates + 2 * groups * head_dim) + queries * hidden
    head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    query = hidden * heads * head
    if mla.q_lora_rank is not None:
        query = mla.q_lora_rank * (hidden + heads * head + 1)  # the + 1 is the latent's norm
    keys = mla.kv_lora_rank * (hidden + heads * (mla.qk_nope_head_dim + mla.v_head_dim) + 1)
    return query + keys + hidden * mla.qk_rope_head_dim + heads * mla.v_head_dim * hidden


def core_widths(model: ModelSpec) -> int:
    """Return the summed widths of QK^T and of the product with V over all heads: usually 2 x heads x head_dim."""
    head_dim, _, _ = check_resolved(model)
    mla = model.mla
    if mla.kv_lora_rank is None:
        return 2 * model.num_attention_heads * head_dim
    return model.num_attention_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)


def mlp_weights(model: ModelSpec, *, experts: bool) -> int:
    """Return the weights of one layer's feed-forward block that multiply each token."""
    matrices = 3 if model.activation in GATED else 2
    width = model.ffn_hidden_size
    if experts:
        width = (model.moe.ffn_hidden_size or width) * model.moe.top_k + model.moe.shared_ffn_hidden_size
    return matrices * model.hidden_size * width
