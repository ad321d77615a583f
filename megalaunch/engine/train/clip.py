"""The gradient norm over every axis, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megalaunch.engine.placement import local_values, replication


def local_squared_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """This rank's share of the squared gradient norm, a float64 scalar; the sum over all ranks is the whole.

    Each value counts 1 / (ranks that hold it), so one all-reduce over the world is exact on any mix of meshes.
    """
    by_replication: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_replication.setdefault(replication(parameter.grad), []).append(local_values(parameter.grad))
    total = torch.zeros((), dtype=torch.float64)
    for copies, gradients in by_replication.items():
        # On a processor an fp32 sum of a million squares is off by 1e-5, and by layouts that cut it differently.
        wide = torch.float64 if gradients[0].is_cpu else torch.float32
        norms = torch._foreach_norm(gradients, 2.0, dtype=wide)
        total = total.to(norms[0].device) + torch.stack(norms).double().square().sum() / copies
    return total


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale all gradients by limit / norm when the norm is larger (Megatron's epsilon of 1e-6)."""
    scale = limit / (norm + 1e-6)
    if limit > 0 and scale < 1:
        torch._foreach_mul_([local_values(p.grad) for p in parameters if p.grad is not None], scale)
