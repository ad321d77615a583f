"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: Llama's tensor names, with experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megalaunch.engine.weight_maps.experts import ExpertNames, feed_forward_mapping
from megalaunch.engine.weight_maps.llama import attention_mapping, embedding_and_head_mapping, norm_mapping
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping
from megalaunch.plan.layers import list_layers
from megalaunch.schema.model import ModelSpec

_MIXTRAL = ExpertNames("block_sparse_moe.", projections={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
_QWEN = ExpertNames(shared="shared_expert")


def _tensors(model: ModelSpec, names: ExpertNames, *, fused: bool = False) -> Iterator[WeightMapping]:
    yield from embedding_and_head_mapping(model)
    for layer in list_layers(model):
        theirs, ours = f"model.layers.{layer.index}.", f"layers.{layer.index}."
        yield from attention_mapping(model, theirs, ours)
        yield from feed_forward_mapping(model, layer.experts, theirs, ours, names, fused=fused)
        yield from norm_mapping(model, theirs, ours)


_FUSED = partial(_tensors, names=_QWEN, fused=True)
MIXTRAL = FamilyWeights(partial(_tensors, names=_MIXTRAL), _FUSED)
WEIGHTS = FamilyWeights(partial(_tensors, names=_QWEN), _FUSED)
