"""Gradient clipping: the global gradient norm under any parallel layout, and the divisor that clips by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megalaunch.engine.dtensor import num_replicas, to_local_no_grad
from megalaunch.kernels.tensor_norms import piece_norms


def local_grad_norm_sq(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return this rank's contribution to the squared gradient norm, an fp64 scalar.

    With G_r the local gradient shards of rank r and c(g) the number of ranks of the mesh that hold a copy of shard g:

        ||g||^2 = sum_r sum_{g in G_r} ||g||^2 / c(g)

    So one all-reduce over the world (`reduce_step_stats`) gives the exact norm, whatever meshes the parameters are on.
    """
    by_replication: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_replication.setdefault(num_replicas(parameter.grad), []).append(to_local_no_grad(parameter.grad))
    total = torch.zeros((), dtype=torch.float64)
    for copies, gradients in by_replication.items():
        norms = piece_norms(gradients)
        total = total.to(norms.device) + norms.double().square().sum() / copies
    return total


def clip_divisor(norm: float, limit: float) -> float:
    """Return the divisor that limits the gradient norm to `limit` (0: no clipping), with Megatron's epsilon of 1e-6."""
    return max((norm + 1e-6) / limit, 1.0) if limit > 0 else 1.0
