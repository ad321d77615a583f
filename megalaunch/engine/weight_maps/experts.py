"""Experts: published files have a tensor per expert and projection, the decoder one per projection, [E, out, in]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalaunch.engine.weight_maps.llama import linear, mlp_mapping
from megalaunch.engine.weight_maps.weight_mapping import WeightMapping, rename
from megalaunch.schema.model import ModelSpec

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertNames:
    """A family's names of the block, its router, shared experts and the projections of an expert."""

    block: str = "mlp."
    router: str = "gate"
    shared: str = "shared_experts"
    projections: Mapping[str, str] = field(default_factory=lambda: {name: name for name in _PROJECTIONS})


def feed_forward_mapping(
    model: ModelSpec, experts: bool, theirs: str, ours: str, names: ExpertNames, *, fused: bool = False
) -> Iterator[WeightMapping]:
    """Map the feed-forward block of one layer.

    Args:
        model: the model section.
        experts: the layer has experts.
        theirs: prefix of the layer's names in files.
        ours: prefix of its names in the decoder.
        names: the family's names.
        fused: the files have the experts of the layer in two tensors, `gate_up_proj` and `down_proj`.
    """
    if not experts:
        yield from mlp_mapping(model, f"{theirs}mlp.", f"{ours}mlp.")
        return
    block, moe = f"{theirs}{names.block}", model.moe
    yield from linear(f"{block}{names.router}", f"{ours}mlp.router", moe.router_bias)
    if moe.balance_bias:
        yield rename(f"{block}{names.router}.e_score_correction_bias", f"{ours}mlp.router.expert_bias")
    if fused:
        entries = [f"{ours}mlp.experts.{name}.weight" for name in ("gate_proj", "up_proj")]
        yield concat_gate_up(f"{block}experts.gate_up_proj", entries)
        yield rename(f"{block}experts.down_proj", f"{ours}mlp.experts.down_proj.weight")
    else:
        for our_name, their_name in names.projections.items():
            each = [f"{block}experts.{index}.{their_name}.weight" for index in range(moe.num_experts or 0)]
            yield stack(each, f"{ours}mlp.experts.{our_name}.weight")
    if moe.shared_ffn_hidden_size:
        yield from mlp_mapping(model, f"{block}{names.shared}.", f"{ours}mlp.shared_experts.")
    if moe.shared_expert_gate:
        yield rename(f"{block}shared_expert_gate.weight", f"{ours}mlp.shared_expert_gate.weight")


def stack(theirs: Sequence[str], ours: str) -> WeightMapping:
    """Map tensors of one shape to a parameter that stacks them along a new first dimension."""

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        first = tensors[0]
        stacked = torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)
        stacked[0] = first
        for index in range(1, len(tensors)):  # one at a time: the tensors may be read only when they are taken
            stacked[index] = tensors[index]
        return [stacked]

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors[0].unbind()

    return WeightMapping(tuple(theirs), (ours,), join, split, stacked=True)


def concat_gate_up(theirs: str, ours: Sequence[str]) -> WeightMapping:
    """Map the gate and up projections [E, F, H] of all experts to their concatenation [E, 2 F, H]."""

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors[0].chunk(2, dim=1)

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(list(tensors), dim=1)]

    return WeightMapping((theirs,), tuple(ours), split, join)
