"""DeepSeek-V2, DeepSeek-V3 and Moonlight: latent attention, dense first layers, experts and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megalaunch.engine.weight_maps.experts import ExpertNames, feed_forward_mapping
from megalaunch.engine.weight_maps.latent_attention import latent_attention_mapping
from megalaunch.engine.weight_maps.llama import embedding_and_head_mapping, norm_mapping
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping
from megalaunch.plan.layers import list_layers
from megalaunch.schema.model import ModelSpec


def _tensors(model: ModelSpec, *, fused: bool = False) -> Iterator[WeightMapping]:
    yield from embedding_and_head_mapping(model)
    for layer in (layer for layer in list_layers(model) if not layer.mtp):
        theirs, ours = f"model.layers.{layer.index}.", f"layers.{layer.index}."
        yield from latent_attention_mapping(model, f"{theirs}self_attn.", f"{ours}attention.")
        yield from feed_forward_mapping(model, layer.experts, theirs, ours, ExpertNames(), fused=fused)
        yield from norm_mapping(model, theirs, ours)


WEIGHTS = FamilyWeights(_tensors, partial(_tensors, fused=True))
