"""Where the values of a sharded tensor are; the one file that opens a DTensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


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


def placed_like(tensor: Tensor, value: Tensor) -> Tensor:
    """The global `value`, the same on every rank, on the device and in the layout of `tensor`."""
    if not isinstance(tensor, DTensor):
        return value.to(tensor.device)
    # Every rank has the whole value already, so nothing needs to be sent: src_data_rank=None.
    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
