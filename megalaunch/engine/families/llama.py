"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.model.decoder import DecoderConfig


def decoder_config(model: ModelSpec) -> DecoderConfig:
    """The decoder of a resolved model section; raises ValueError when the vocabulary is still open."""
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is still null: the data must be prepared before a model is built")
    return DecoderConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_heads=model.num_attention_heads,
        num_groups=model.num_query_groups or model.num_attention_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        vocab_size=model.vocab_size,
        norm_epsilon=model.norm_epsilon,
        rope_theta=model.rope.theta,
        tied_embeddings=model.tied_embeddings,
        init_std=model.init_std,
        embedding_init_std=model.init_std if model.embedding_init_std is None else model.embedding_init_std,
    )
