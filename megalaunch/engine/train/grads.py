"""Gradients between the backward pass and the update: sum those that are still partial, then norm and clipping.

Gradients are reduced over data-parallel ranks before, by FSDP2 (`set_grad_sync` and `reduce_grads` in
parallel/fsdp.py).

Partial over tp (`ParamLayout.is_partial`): parameters that are replicated over the tp ranks, while each rank computes
their gradient from its own part of the activations:

- norms, row-parallel biases and position embeddings under sequence parallelism: each rank applies them to its shard of
  the tokens;
- per-head norms: each rank applies them to its own heads;
- key/value projections with fewer heads than tp ranks: ranks share a head.

With g_r the gradient of rank r, every rank ends up with g = sum_r g_r, in one all-reduce over tp.

Why once a step: the sum is linear, so it commutes with gradient accumulation. Summed inside backward, the gradients
would take one small all-reduce per parameter and microbatch; here all of them are concatenated into one fp32 buffer,
after the reduction over data-parallel ranks, so it holds only this rank's FSDP shards. The sum is taken in fp32,
whatever the dtype of the gradients.

Partial over stages: a tied head or MTP depths on another pipeline stage than the embedding hold a copy of its matrix;
the copy's gradient is sent to the embedding's stage and added there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megalaunch.engine.collectives import all_reduce_async
from megalaunch.engine.dtensor import num_replicas, to_local_no_grad
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.embedding_copies import reduce_embedding_grads
from megalaunch.engine.param_layout import get_param_layout
from megalaunch.kernels.tensor_norms import per_tensor_norms


@torch.no_grad()
def finalize_grads(model: ModelParts, mesh: Mesh, sequence_parallel: bool) -> None:
    """Sum partial gradients over tp, and those of the embedding's copies over pp, in place. Collective over tp and pp.

    Megatron's counterpart is `finalize_model_grads`.
    """
    _all_reduce_partial_grads(mesh.tp, model, sequence_parallel)
    reduce_embedding_grads(model, mesh)


def _all_reduce_partial_grads(axis: Axis, model: ModelParts, sequence_parallel: bool) -> None:
    """All-reduce all partial gradients over tp, as one fp32 buffer."""
    if axis.size == 1:
        return
    partial = _partial_grads(model, axis.size, sequence_parallel)
    if not partial:
        return
    flat = torch.cat([gradient.flatten().float() for gradient in partial])
    sizes = [gradient.numel() for gradient in partial]
    summed = torch.split(all_reduce_async(flat, axis).wait(), sizes)
    for gradient, total in zip(partial, summed, strict=True):
        gradient.copy_(total.view_as(gradient))


def _partial_grads(model: ModelParts, ranks: int, sequence_parallel: bool) -> list[Tensor]:
    """Return this rank's shards of the partial gradients, in model order, which is the same on all tp ranks."""
    return [
        to_local_no_grad(parameter.grad)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.grad is not None and get_param_layout(module, name).is_partial(ranks, sequence_parallel)
    ]


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
    shares = [
        per_tensor_norms(gradients).double().square().sum() / copies for copies, gradients in by_replication.items()
    ]
    return sum(shares[1:], shares[0]) if shares else torch.zeros((), dtype=torch.float64)


def clip_divisor(norm: float, limit: float) -> float:
    """Return the divisor that limits the gradient norm to `limit` (0: no clipping), with Megatron's epsilon of 1e-6."""
    return max((norm + 1e-6) / limit, 1.0) if limit > 0 else 1.0
