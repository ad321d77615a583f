"""Build the decoder of a model section. All differences between families are fields of the section."""

from __future__ import annotations

import torch

from megalaunch.engine.model.attention.core import NO_CP, ContextParallelism
from megalaunch.engine.model.config import (
    AttentionConfig,
    DecoderConfig,
    LatentConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
)
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.layer_modules import STANDARD_MODULES, LayerModules
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing
from megalaunch.engine.model.moe.dispatcher import TokenDispatcher
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.plan.attention_factor import latent_softmax_factor
from megalaunch.plan.layers import Layer, list_layers
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.rope import RopeSpec


def build_decoder(
    model: ModelSpec,
    tp_region: TPRegion = NO_TP,
    context: ContextParallelism = NO_CP,
    block_dtype: torch.dtype | None = None,
    dispatcher: TokenDispatcher | None = None,
    balancing: Balancing = ONE_RANK,
    modules: LayerModules = STANDARD_MODULES,
) -> Decoder:
    """Build the decoder of a resolved model section on the default device (usually meta).

    Args:
        model: the resolved model section.
        tp_region: the tensor-parallel region that all modules share.
        context: the context parallelism of the attention layers.
        block_dtype: as `Decoder`'s.
        dispatcher: as `Decoder`'s.
        balancing: as `Decoder`'s.
        modules: as `Decoder`'s.
    """
    return Decoder(make_decoder_config(model), tp_region, context, block_dtype, dispatcher, balancing, modules)


def make_decoder_config(model: ModelSpec) -> DecoderConfig:
    """Convert a resolved model section to a DecoderConfig. Raises ValueError while the vocabulary size is unknown."""
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is still null: the data must be prepared before a model is built")
    learned = model.position_embedding == "learned"
    return DecoderConfig(
        layers=tuple(_layer(model, layer) for layer in list_layers(model) if not layer.mtp),
        mtp_layers=tuple(_layer(model, layer) for layer in list_layers(model) if layer.mtp),
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        attention=_attention(model),
        mlp=_mlp(model, model.ffn_hidden_size),
        moe=_moe(model),
        norm=NormConfig(model.norm_epsilon, layer=model.norm == "layernorm", zero_centered_gamma=model.norm_plus_one),
        norm_placement=model.norm_placement,
        parallel_residual=model.parallel_residual,
        learned_positions=model.max_position_embeddings if learned else None,
        embedding_scale=model.hidden_size**0.5 if model.scale_embeddings else 1.0,
        final_logit_softcapping=model.final_logit_softcapping,
        hidden_dropout=model.hidden_dropout,
        embedding_dropout=model.hidden_dropout if model.embedding_dropout is None else model.embedding_dropout,
        tie_word_embeddings=model.tie_word_embeddings,
        init_std=model.init_std,
        embedding_init_std=model.init_std if model.embedding_init_std is None else model.embedding_init_std,
    )


def resolve_head_dim(model: ModelSpec) -> int:
    """Return the width of one query and key head."""
    if model.mla.kv_lora_rank is not None:
        return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
    return model.head_dim or model.hidden_size // model.num_attention_heads


def _attention(model: ModelSpec) -> AttentionConfig:
    head_dim, latent = resolve_head_dim(model), _latent(model)
    scale = (model.query_pre_attn_scalar or head_dim) ** -0.5
    return AttentionConfig(
        num_heads=model.num_attention_heads,
        num_groups=model.num_query_groups or model.num_attention_heads,
        head_dim=head_dim,
        softmax_scale=scale if latent is None else scale * latent_softmax_factor(model.rope),
        soft_cap=model.attn_logit_softcapping,
        sinks=model.attention_sinks,
        output_gate=model.attention_output_gate,
        qk_norm=model.qk_norm,
        qkv_bias=model.qkv_bias,
        output_bias=model.attention_output_bias,
        dropout=model.attention_dropout,
        latent=latent,
    )


def _latent(model: ModelSpec) -> LatentConfig | None:
    mla = model.mla
    if mla.kv_lora_rank is None:
        return None
    return LatentConfig(
        kv_lora_rank=mla.kv_lora_rank,
        q_lora_rank=mla.q_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        norm_epsilon=mla.norm_epsilon,
    )


def _mlp(model: ModelSpec, width: int) -> MLPConfig:
    return MLPConfig(width=width, activation=model.activation, clamp=model.swiglu_limit, bias=model.mlp_bias)


def _moe(model: ModelSpec) -> MoEConfig | None:
    moe = model.moe
    if moe.num_experts is None:
        return None
    return MoEConfig(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        expert=_mlp(model, moe.ffn_hidden_size or model.ffn_hidden_size),
        shared_experts=_mlp(model, moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else None,
        shared_expert_gate=moe.shared_expert_gate,
        score=moe.score,
        normalize_top_k=moe.normalize_top_k,
        scaling_factor=moe.scaling_factor,
        router_bias=moe.router_bias,
        router_dtype=moe.router_dtype,
        balance_bias=moe.balance_bias,
        num_groups=moe.num_groups,
        top_k_groups=moe.top_k_groups,
        group_score_top_k=moe.group_score_top_k or moe.top_k // (moe.top_k_groups or 1),
        balance_loss=moe.balance_loss,
        balance_loss_coeff=moe.balance_loss_coeff,
        choice=moe.choice,
        z_loss_coeff=moe.z_loss_coeff,
        capacity_factor=moe.capacity_factor,
        drop_policy=moe.drop_policy,
        pad_to_capacity=moe.pad_to_capacity,
        input_jitter=moe.input_jitter,
    )


def _layer(model: ModelSpec, layer: Layer) -> LayerConfig:
    """Convert one layer: its sliding window, its RoPE (None for a layer without rotary embedding), and its experts."""
    if not layer.rotated:
        return LayerConfig(layer.window, None, layer.experts)
    rotated = resolve_head_dim(model) if model.mla.kv_lora_rank is None else model.mla.qk_rope_head_dim
    width = round(rotated * model.rope.fraction)
    if layer.window is not None and model.rope.window_theta is not None:
        rope = RopeConfig(theta=model.rope.window_theta, rotary_dim=width)
        return LayerConfig(layer.window, rope, layer.experts)
    return LayerConfig(layer.window, _rope(model.rope, width), layer.experts)


def _rope(rope: RopeSpec, width: int) -> RopeConfig:
    return RopeConfig(
        theta=rope.theta,
        rotary_dim=width,
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
