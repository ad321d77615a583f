"""Where the values of a sharded tensor are; the one file that opens a DTensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
