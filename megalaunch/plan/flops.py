"""Floating-point operations of a training step, counted as Megatron-LM counts them (causal attention).

One multiply-add is 2, forward and backward 3 passes: 6 for each weight and token. Norms, the embedding look-up
and recomputation are not counted.
"""

from __future__ import annotations

from megalaunch.config.schema import RunSpec


def step_flops(spec: RunSpec) -> int:
    """Model FLOPs of one optimizer step over all devices, of a resolved spec; ValueError while a shape is open.

    Equals `num_floating_point_operations` of Megatron-LM for dense decoders with a gated feed-forward block.
    """
    model, batch = spec.model, spec.batch
    if model.head_dim is None or model.num_query_groups is None or model.vocab_size is None:
        raise ValueError("the model is not resolved: head_dim, num_query_groups or vocab_size is open")
    tokens = batch.global_batch_size * batch.sequence_length
    pairs = batch.global_batch_size * batch.sequence_length**2
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys = model.num_query_groups * model.head_dim
    projections = 6 * tokens * (hidden * (queries + 2 * keys) + queries * hidden)
    core = 6 * pairs * queries  # scores and values, half of them masked
    feed_forward = 6 * tokens * hidden * model.ffn_hidden_size * 3
    logits = 6 * tokens * hidden * model.vocab_size
    return model.num_layers * (projections + core + feed_forward) + logits


def flops_per_token(spec: RunSpec) -> float:
    """Model FLOPs of one trained token."""
    return step_flops(spec) / (spec.batch.global_batch_size * spec.batch.sequence_length)
