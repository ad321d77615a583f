"""The decoder that a model section means, whatever its family: every difference between families is a field."""

from __future__ import annotations

import torch

from megalaunch.config.schema.model import ModelSpec
from megalaunch.config.schema.rope import RopeSpec
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
)
from megalaunch.engine.model.context import WHOLE_SAMPLE, Context
from megalaunch.engine.model.decoder import Decoder
from megalaunch.plan.layers import Layer, layers_of


def build_decoder(
    model: ModelSpec,
    boundary: Boundary = ONE_DEVICE,
    context: Context = WHOLE_SAMPLE,
    narrow: torch.dtype | None = None,
) -> Decoder:
    """The decoder of a resolved model section, on the current default device (usually meta); `narrow` as Decoder's."""
    return Decoder(decoder_config(model), boundary, context, narrow)


def decoder_config(model: ModelSpec) -> DecoderConfig:
    """What a resolved model section comes to; raises ValueError when the vocabulary is still open."""
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is still null: the data must be prepared before a model is built")
    learned = model.position_embedding == "learned"
    return DecoderConfig(
        layers=tuple(_layer(model, layer) for layer in layers_of(model) if not layer.mtp),
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        attention=_attention(model),
        mlp=MLPConfig(
            width=model.ffn_hidden_size,
            activation=model.activation,
            clamp=model.activation_clamp,
            bias=model.mlp_bias,
        ),
        norm=NormConfig(model.norm_epsilon, layer=model.norm == "layernorm", plus_one=model.norm_plus_one),
        block_norms=model.block_norms,
        parallel_residual=model.parallel_residual,
        learned_positions=model.max_position_embeddings if learned else None,
        embedding_scale=model.hidden_size**0.5 if model.scaled_embedding else 1.0,
        logit_soft_cap=model.logit_soft_cap,
        hidden_dropout=model.hidden_dropout,
        embedding_dropout=model.hidden_dropout if model.embedding_dropout is None else model.embedding_dropout,
        tied_embeddings=model.tied_embeddings,
        init_std=model.init_std,
        embedding_init_std=model.init_std if model.embedding_init_std is None else model.embedding_init_std,
    )


def head_dim_of(model: ModelSpec) -> int:
    """Width of one head."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def _attention(model: ModelSpec) -> AttentionConfig:
    head_dim = head_dim_of(model)
    return AttentionConfig(
        num_heads=model.num_attention_heads,
        num_groups=model.num_query_groups or model.num_attention_heads,
        head_dim=head_dim,
        scale_dim=model.attention_scale_dim or head_dim,
        soft_cap=model.attention_soft_cap,
        sinks=model.attention_sinks,
        qk_norm=model.qk_norm,
        qkv_bias=model.qkv_bias,
        output_bias=model.attention_output_bias,
        dropout=model.attention_dropout,
    )


def _layer(model: ModelSpec, layer: Layer) -> LayerConfig:
    if not layer.rotated:
        return LayerConfig(layer.window, None)
    width = round(head_dim_of(model) * model.rope.fraction)
    if layer.window is not None and model.rope.window_theta is not None:
        return LayerConfig(layer.window, RopeConfig(theta=model.rope.window_theta, width=width))
    return LayerConfig(layer.window, _rope(model.rope, width))


def _rope(rope: RopeSpec, width: int) -> RopeConfig:
    return RopeConfig(
        theta=rope.theta,
        width=width,
        scaling=rope.scaling,
        factor=rope.factor,
        original_positions=rope.original_positions or 1,
        low_frequency_factor=rope.low_frequency_factor,
        high_frequency_factor=rope.high_frequency_factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        truncate=rope.truncate,
        short_factors=rope.short_factors,
        long_factors=rope.long_factors,
        attention_factor=rope.attention_factor,
        mscale=rope.mscale,
        mscale_all_dim=rope.mscale_all_dim,
    )
