"""Norms of the pieces of a list of tensors, whose root of the sum of squares is the norm of them all."""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.kernels.forms import on_cpu

_ROW = 256  # numbers that are summed in fp32 on a CPU


def per_tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of pieces that together make up all tensors, fp32 [number of pieces]."""
    return piece_norms_cpu(tensors) if on_cpu(tensors[0]) else piece_norms_reference(tensors)


def piece_norms_reference(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor."""
    return torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float32))


def piece_norms_cpu(tensors: list[Tensor]) -> Tensor:
    """Return the norm of every row of 256 numbers.

    On a CPU an fp32 sum of a million squares has an error of 1e-5, which differs between parallel layouts, as these
    shard it differently. Sums of rows of 256 are exact to 1e-9, in half the time of converting every number to fp64.
    """
    parts = []
    for tensor in tensors:
        flat = tensor.flatten()
        rows = flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)
        rest = flat[rows.numel() :]
        parts += [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in (rows, rest[None])]
    return torch.cat(parts)
