"""Megatron-core's GPT tensors as its torch_dist checkpoints name them: fused rows, experts, latent attention, MTP.

Names are those of Transformer Engine's fused layers, whose linear layers contain the norm before them. Checkpoints
saved with `singleton_local_shards` have a tensor per expert, and per half of a gated projection (`_w`: gate, `_v`: up).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalaunch.engine.model.build import resolve_head_dim
from megalaunch.engine.weight_maps.experts import concat_gate_up, stack
from megalaunch.engine.weight_maps.weight_mapping import WeightMapping, concat_rows, rename, rope_pairs_to_halves
from megalaunch.plan.layers import Layer, list_layers
from megalaunch.schema.model import GATED, ModelSpec

_DEPTH = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "final_layernorm": "norm"}


def megatron_mappings(model: ModelSpec, *, singleton: bool) -> Iterator[WeightMapping]:
    """Yield the mappings of a GPT model; `singleton`: it was saved with singleton_local_shards."""
    yield rename("embedding.word_embeddings.weight", "embedding.weight")
    if model.position_embedding == "learned":
        yield rename("embedding.position_embeddings.weight", "embedding.positions")
    for part in _norm_parts(model):
        yield rename(f"decoder.final_layernorm.{part}", f"norm.{part}")
    if not model.tie_word_embeddings:
        yield rename("output_layer.weight", "head.weight")
    for layer in list_layers(model):
        if layer.mtp:
            number = layer.index - model.num_layers
            theirs, ours = f"mtp.layers.{number}.", f"mtp.{number}."
            for name, own in _DEPTH.items():
                parts = ("weight",) if name == "eh_proj" else _norm_parts(model)
                yield from (rename(f"{theirs}{name}.{part}", f"{ours}{own}.{part}") for part in parts)
            yield from _layer(model, layer, f"{theirs}transformer_layer.", f"{ours}layer.", singleton)
        else:
            yield from _layer(model, layer, f"decoder.layers.{layer.index}.", f"layers.{layer.index}.", singleton)


def _layer(model: ModelSpec, layer: Layer, theirs: str, ours: str, singleton: bool) -> Iterator[WeightMapping]:
    """Map one layer of the decoder or of multi-token prediction."""
    latent = model.mla.kv_lora_rank is not None
    before = "input_layernorm." if latent else "self_attention.linear_qkv.layer_norm_"
    for part in _norm_parts(model):
        yield rename(f"{theirs}{before}{part}", f"{ours}attention_norm.{part}")
        yield rename(f"{theirs}mlp.linear_fc1.layer_norm_{part}", f"{ours}mlp_norm.{part}")
    attention = _latent_attention if latent else _attention
    yield from attention(model, f"{theirs}self_attention.", f"{ours}attention.")
    if not layer.experts:
        yield from _mlp(model, f"{theirs}mlp.", f"{ours}mlp.", model.ffn_hidden_size, singleton)
    elif singleton:
        yield from _router_and_shared(model, f"{theirs}mlp.", f"{ours}mlp.", singleton)
        yield from _single_experts(model, f"{theirs}mlp.experts.experts.", f"{ours}mlp.experts.")
    else:
        yield from _router_and_shared(model, f"{theirs}mlp.", f"{ours}mlp.", singleton)
        yield from _stacked_experts(model, f"{theirs}mlp.experts.experts.", f"{ours}mlp.experts.")


def _attention(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    names = ("q", "gate", "k", "v") if model.attention_output_gate else ("q", "k", "v")
    for part in _parts(model.qkv_bias):
        yield _interleaved_qkv(f"{theirs}linear_qkv.{part}", [f"{ours}{name}_proj.{part}" for name in names], model)
    for part in _parts(model.attention_output_bias):
        yield rename(f"{theirs}linear_proj.{part}", f"{ours}o_proj.{part}")
    if model.qk_norm == "head":
        for name in "qk":
            for part in _norm_parts(model):
                yield rename(f"{theirs}{name}_layernorm.{part}", f"{ours}{name}_norm.{part}")


def _latent_attention(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map multi-head latent attention. The rotated rows are in pairs, as in DeepSeek's files."""
    heads, rotated = model.num_attention_heads, model.mla.qk_rope_head_dim
    if model.mla.q_lora_rank is None:
        yield rope_pairs_to_halves(f"{theirs}linear_q_proj.weight", f"{ours}q_proj.weight", heads, rotated)
    else:
        yield rename(f"{theirs}linear_q_down_proj.weight", f"{ours}q_a_proj.weight")
        yield rope_pairs_to_halves(f"{theirs}linear_q_up_proj.weight", f"{ours}q_b_proj.weight", heads, rotated)
        for part in _norm_parts(model):
            yield rename(f"{theirs}linear_q_up_proj.layer_norm_{part}", f"{ours}q_a_norm.{part}")
    yield rope_pairs_to_halves(f"{theirs}linear_kv_down_proj.weight", f"{ours}kv_a_proj.weight", 1, rotated)
    for part in _norm_parts(model):
        yield rename(f"{theirs}linear_kv_up_proj.layer_norm_{part}", f"{ours}kv_a_norm.{part}")
    yield rename(f"{theirs}linear_kv_up_proj.weight", f"{ours}kv_b_proj.weight")
    for part in _parts(model.attention_output_bias):
        yield rename(f"{theirs}linear_proj.{part}", f"{ours}o_proj.{part}")


def _mlp(model: ModelSpec, theirs: str, ours: str, width: int, singleton: bool) -> Iterator[WeightMapping]:
    names = ["gate_proj", "up_proj"] if model.activation in GATED else ["up_proj"]
    for part in _parts(model.mlp_bias):
        if singleton and len(names) > 1:
            for name, half in zip(names, "wv", strict=True):
                yield rename(f"{theirs}linear_fc1.{part}_{half}", f"{ours}{name}.{part}")
        else:
            rows = [width] * len(names)
            yield concat_rows(f"{theirs}linear_fc1.{part}", [f"{ours}{name}.{part}" for name in names], rows)
        yield rename(f"{theirs}linear_fc2.{part}", f"{ours}down_proj.{part}")


def _router_and_shared(model: ModelSpec, theirs: str, ours: str, singleton: bool) -> Iterator[WeightMapping]:
    """Map the router and the shared experts of a layer."""
    moe = model.moe
    for part in _parts(moe.router_bias):
        yield rename(f"{theirs}router.{part}", f"{ours}router.{part}")
    if moe.balance_bias:
        yield rename(f"{theirs}router.expert_bias", f"{ours}router.expert_bias")
    if moe.shared_ffn_hidden_size:
        shared = f"{theirs}shared_experts.", f"{ours}shared_experts."
        yield from _mlp(model, *shared, moe.shared_ffn_hidden_size, singleton)
    if moe.shared_expert_gate:
        yield rename(f"{theirs}shared_experts.gate_weight", f"{ours}shared_expert_gate.weight")


def _stacked_experts(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map the experts of a layer, stacked [E, out, in], whether they are computed one by one or grouped."""
    for part in _parts(model.mlp_bias):
        if model.activation in GATED:
            yield concat_gate_up(
                f"{theirs}linear_fc1.{part}", [f"{ours}{name}.{part}" for name in ("gate_proj", "up_proj")]
            )
        else:
            yield rename(f"{theirs}linear_fc1.{part}", f"{ours}up_proj.{part}")
        yield rename(f"{theirs}linear_fc2.{part}", f"{ours}down_proj.{part}")


def _single_experts(model: ModelSpec, theirs: str, ours: str) -> Iterator[WeightMapping]:
    """Map the experts of a layer that are saved one by one."""
    gated = model.activation in GATED
    for part in _parts(model.mlp_bias):
        names = {"up_proj": f"linear_fc1.{part}", "down_proj": f"linear_fc2.{part}"}
        if gated:
            names |= {"gate_proj": f"linear_fc1.{part}_w", "up_proj": f"linear_fc1.{part}_v"}
        for own, name in names.items():
            each = [f"{theirs}{expert}.{name}" for expert in range(model.moe.num_experts or 0)]
            yield stack(each, f"{ours}{own}.{part}")


def _parts(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _norm_parts(model: ModelSpec) -> tuple[str, ...]:
    return _parts(model.norm == "layernorm")


def _interleaved_qkv(theirs: str, ours: Sequence[str], model: ModelSpec) -> WeightMapping:
    """Map the fused QKV matrix. Its rows are: queries of group 0, any gates of them, its key, its value, ..."""
    groups, width = model.num_query_groups or model.num_attention_heads, resolve_head_dim(model)
    queries = model.num_attention_heads // groups * width
    rows = [queries] * (len(ours) - 2) + [width, width]

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = tensors
        by_group = fused.reshape(groups, sum(rows), *fused.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(by_group, rows, dim=1)]

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in tensors]
        return [torch.cat(by_group, dim=1).flatten(0, 1)]

    return WeightMapping((theirs,), tuple(ours), split, join)
