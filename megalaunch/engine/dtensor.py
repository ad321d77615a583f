"""Where the values of a DTensor are: making, filling and reading the tensors that lie over a mesh at rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megalaunch.engine.param_layout import ParamLayout


def shard_param(parameter: nn.Parameter, layout: ParamLayout, axis_mesh: DeviceMesh) -> nn.Parameter:
    """The parameter (on meta) as a DTensor over the tensor-parallel axis."""
    split = layout.shard_dim
    placement = Shard(split) if split is not None and layout.is_sharded(axis_mesh.size()) else Replicate()
    return nn.Parameter(distribute_tensor(parameter.detach(), axis_mesh, [placement], src_data_rank=None))


def to_local_no_grad(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, gradient or moment, sharing its memory; no gradient flows through it."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def num_replicas(tensor: Tensor) -> int:
    """How many ranks of the tensor's mesh hold the same values."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for axis, placement in enumerate(tensor.placements):
        copies *= tensor.device_mesh.size(axis) if placement.is_replicate() else 1
    return copies


def copy_from_global_(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor its part of the global `value`, which every rank has whole; rows that it lacks are zeros."""
    if value.shape != tensor.shape:  # those that pad a vocabulary
        assert value.shape[1:] == tensor.shape[1:], "only rows are padded"
        padded = value.new_zeros(tensor.shape)
        padded[: value.shape[0]] = value
        value = padded
    for dim, (start, count) in enumerate(local_slice(tensor)):
        value = value.narrow(dim, start, count)
    to_local_no_grad(tensor).copy_(value)


def local_slice(tensor: Tensor) -> list[tuple[int, int]]:
    """Which part of a tensor is this rank's: the first index along each dim, and how many.

    Tensor-parallel ranks divide first, then those that share data (the inner axis of the mesh is last).
    """
    part = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return part
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]  # Shard and _StridedShard
        size, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        first, whole = part[dim]
        width = -(-whole // size)  # torch.chunk's rule: the last ranks may have less, or nothing
        start = min(rank * width, whole)
        part[dim] = first + start, min(width, whole - start)
    return part
