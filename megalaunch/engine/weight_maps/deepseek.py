"""DeepSeek-V2, DeepSeek-V3 and Moonlight: latent attention, dense first layers, experts, multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megalaunch.engine.weight_maps.experts import ExpertNames, feed_forward_mapping
from megalaunch.engine.weight_maps.latent_attention import latent_attention_mapping
from megalaunch.engine.weight_maps.llama import embedding_and_head_mapping, norm_mapping
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping, rename
from megalaunch.plan.layers import list_layers
from megalaunch.schema.model import ModelSpec

_DEPTH = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "shared_head.norm": "norm"}


def _tensors(model: ModelSpec, *, fused: bool = False) -> Iterator[WeightMapping]:
    yield from embedding_and_head_mapping(model)
    for layer in list_layers(model):
        theirs, ours = f"model.layers.{layer.index}.", f"layers.{layer.index}."
        if layer.mtp:
            depth = f"mtp.{layer.index - model.num_layers}."
            yield from (rename(f"{theirs}{name}.weight", f"{depth}{own}.weight") for name, own in _DEPTH.items())
            ours = f"{depth}layer."
        yield from latent_attention_mapping(model, f"{theirs}self_attn.", f"{ours}attention.")
        yield from feed_forward_mapping(model, layer.experts, theirs, ours, ExpertNames(), fused=fused)
        yield from norm_mapping(model, theirs, ours)


def _copies(model: ModelSpec) -> dict[str, str]:
    """Return the copies of embedding and head in each layer of multi-token prediction."""
    head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    found = {}
    for layer in (layer for layer in list_layers(model) if layer.mtp):
        found[f"model.layers.{layer.index}.embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"model.layers.{layer.index}.shared_head.head.weight"] = head
    return found


WEIGHTS = FamilyWeights(_tensors, partial(_tensors, fused=True), copies=_copies)
