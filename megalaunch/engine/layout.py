"""How parameters lie over tensor-parallel ranks, and where their values are; the one file that opens a DTensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


@dataclass(frozen=True)
class ParamLayout:
    """Declared beside a parameter: what tensor-parallel ranks hold of it, and what their gradients are.

    `split`: the dim divided among ranks, None: all hold the whole. `pieces`: into how many parts it divides at most
    (key/value heads); with more ranks than pieces all hold the whole and each uses one piece. `partial_under_sp`:
    ranks see different tokens under sequence parallelism, so that their gradients are parts of a sum.
    """

    split: int | None = None
    pieces: int | None = None
    partial_under_sp: bool = False

    def divides(self, ranks: int) -> bool:
        """Does each of `ranks` hold a part of its own?"""
        return self.split is not None and (self.pieces is None or self.pieces >= ranks)

    def is_partial(self, ranks: int, sequence_parallel: bool) -> bool:
        """Has `train.finalize` to sum the ranks' gradients?"""
        if ranks == 1 or self.divides(ranks):
            return False
        return self.split is not None or (self.partial_under_sp and sequence_parallel)


COLUMNS = ParamLayout(split=0)
"""Output features are divided: the inputs of a tensor-parallel region, the embedding and the head."""
ROWS = ParamLayout(split=1)
"""Input features are divided: what ends a region with a sum over ranks."""
EVERYWHERE = ParamLayout(partial_under_sp=True)
"""Norms: every rank holds the whole and, under sequence parallelism, applies it to its own tokens."""


def layout_of(module: nn.Module) -> ParamLayout:
    """What a module that has parameters of its own declares of them."""
    layout = getattr(module, "layout", None)
    assert isinstance(layout, ParamLayout), f"{type(module).__name__} has parameters and declares no layout"
    return layout


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, as the forward pass reads it; the gradient flows back to the parameter.

    The gradient has the label of the parameter: what is a part of a sum is summed once a step (train.finalize).
    """
    if isinstance(parameter, DTensor):
        return parameter.to_local(grad_placements=parameter.placements)
    return parameter


def piece(parameter: Tensor, layout: ParamLayout, rank: int, ranks: int) -> Tensor:
    """What rank `rank` of `ranks` multiplies with: its part, or its piece of the whole where ranks share pieces."""
    values = local(parameter)
    if layout.split is None or layout.divides(ranks):
        return values
    assert layout.pieces is not None, "only pieces can be fewer than ranks"
    return values.chunk(layout.pieces, dim=layout.split)[rank * layout.pieces // ranks]


def divided(
    parameter: nn.Parameter, layout: ParamLayout, axis_mesh: torch.distributed.device_mesh.DeviceMesh
) -> nn.Parameter:
    """The parameter (on meta) as a DTensor over the tensor-parallel axis."""
    split = layout.split
    placement = Shard(split) if split is not None and layout.divides(axis_mesh.size()) else Replicate()
    return nn.Parameter(distribute_tensor(parameter.detach(), axis_mesh, [placement], src_data_rank=None))


def local_values(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, gradient or moment, sharing its memory; no gradient flows through it."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def replication(tensor: Tensor) -> int:
    """How many ranks of the tensor's mesh hold the same values."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for axis, placement in enumerate(tensor.placements):
        copies *= tensor.device_mesh.size(axis) if placement.is_replicate() else 1
    return copies


def fill(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor its part of the global `value`, which every rank has whole."""
    local_values(tensor).copy_(_part(tensor, value) if isinstance(tensor, DTensor) else value)


def _part(tensor: DTensor, value: Tensor) -> Tensor:
    """This rank's slice: tensor-parallel ranks divide first, then those that share data (the inner axis is last)."""
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]  # Shard and _StridedShard
        size, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        width = -(-value.shape[dim] // size)  # torch.chunk's rule: the last ranks may have less, or nothing
        start = min(rank * width, value.shape[dim])
        value = value.narrow(dim, start, min(width, value.shape[dim] - start))
    return value
