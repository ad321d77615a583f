"""DTensor helpers: shard a parameter over the tp axis; read and fill the local shard of a parameter or moment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from megalaunch.engine.param_layout import ParamLayout


def shard_param(parameter: nn.Parameter, layout: ParamLayout, axis_mesh: DeviceMesh) -> nn.Parameter:
    """Return the parameter (on meta) as a DTensor over the tp axis: sharded or replicated, as its layout says."""
    split = layout.shard_dim
    placement = Shard(split) if split is not None and layout.is_sharded(axis_mesh.size()) else Replicate()
    return nn.Parameter(distribute_tensor(parameter.detach(), axis_mesh, [placement], src_data_rank=None))


def shard_expert_param(parameter: nn.Parameter, layout: ParamLayout, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter of routed experts (on meta) as a DTensor over ep and etp, or the one of them in the mesh."""
    placements: list[Placement] = []
    for axis in mesh.mesh_dim_names or ():
        dim = 0 if axis == "ep" else layout.shard_dim
        placements.append(Replicate() if dim is None else Shard(dim))
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None))


def to_local_no_grad(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, gradient or moment. It shares memory and is detached from autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def num_replicas(tensor: Tensor) -> int:
    """Return how many ranks of the tensor's mesh hold the same values; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for axis, placement in enumerate(tensor.placements):
        copies *= tensor.device_mesh.size(axis) if placement.is_replicate() else 1
    return copies


def copy_from_global_(tensor: Tensor, value: Tensor) -> None:
    """Copy this rank's shard of the global `value` into a tensor, in place.

    Every rank has the full `value`. If it has fewer rows than the tensor (a padded vocabulary), the others become 0.
    """
    if value.shape != tensor.shape:  # the tensor has rows that pad the vocabulary
        assert value.shape[1:] == tensor.shape[1:], "only rows are padded"
        padded = value.new_zeros(tensor.shape)
        padded[: value.shape[0]] = value
        value = padded
    for dim, (start, count) in enumerate(local_slice(tensor)):
        value = value.narrow(dim, start, count)
    to_local_no_grad(tensor).copy_(value)


def local_slice(tensor: Tensor) -> list[tuple[int, int]]:
    """Return which slice of the global tensor this rank holds: (first index, count) for each dim.

    Mesh axes shard from the innermost (last) to the outermost: tensor-parallel first, then data-parallel.
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
        first, length = part[dim]
        width = -(-length // size)  # torch.chunk's rule: the last ranks may have less, or nothing
        start = min(rank * width, length)
        part[dim] = first + start, min(width, length - start)
    return part
