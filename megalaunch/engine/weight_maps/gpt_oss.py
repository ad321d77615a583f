"""gpt-oss: the experts of a layer in two tensors, [E, in, out], with gate and up interleaved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalaunch.engine.weight_maps.llama import (
    attention_mapping,
    embedding_and_head_mapping,
    linear,
    norm_mapping,
)
from megalaunch.engine.weight_maps.weight_mapping import FamilyWeights, WeightMapping, rename
from megalaunch.schema.model import ModelSpec


def _tensors(model: ModelSpec) -> Iterator[WeightMapping]:
    yield from embedding_and_head_mapping(model)
    for index in range(model.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        yield from attention_mapping(model, theirs, ours)
        yield rename(f"{theirs}self_attn.sinks", f"{ours}attention.sinks")
        yield from linear(f"{theirs}mlp.router", f"{ours}mlp.router", bias=True)
        experts, own = f"{theirs}mlp.experts.", f"{ours}mlp.experts."
        for suffix, part in (("", "weight"), ("_bias", "bias")):
            entries = (f"{own}gate_proj.{part}", f"{own}up_proj.{part}")
            yield _interleaved(f"{experts}gate_up_proj{suffix}", entries)
        yield _turned(f"{experts}down_proj", f"{own}down_proj.weight")
        yield rename(f"{experts}down_proj_bias", f"{own}down_proj.bias")
        yield from norm_mapping(model, theirs, ours)


def _interleaved(theirs: str, ours: Sequence[str]) -> WeightMapping:
    """Map gate and up, weights [E, F, H] or biases [E, F], to one tensor [E, H, 2 F] or [E, 2 F]: g0, u0, g1, ..."""

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = tensors[0].mT if tensors[0].ndim == 3 else tensors[0]
        return [rows[:, ::2].contiguous(), rows[:, 1::2].contiguous()]  # grouped matmuls take no other strides

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = torch.stack(list(tensors), dim=2).flatten(1, 2)
        return [rows.mT if rows.ndim == 3 else rows]

    return WeightMapping((theirs,), tuple(ours), split, join)


def _turned(theirs: str, ours: str) -> WeightMapping:
    """Map the matrices of all experts, stored as [E, in, out]."""

    def turn(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.mT for tensor in tensors]

    return WeightMapping((theirs,), (ours,), turn, turn)


WEIGHTS = FamilyWeights(_tensors)
