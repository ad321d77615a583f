"""Once a step, before clipping: gradients that are parts of a sum over tensor-parallel ranks or stages are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.engine.collectives import all_reduce_async
from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.tied_embeddings import reduce_tied_embedding_grad
from megalaunch.engine.param_layout import get_param_layout


@torch.no_grad()
def finalize_grads(model: ModelParts, mesh: Mesh, sequence_parallel: bool) -> None:
    """Norms under sequence parallelism, and key/value heads that ranks share: one all-reduce in fp32; tied heads."""
    _all_reduce_partial_grads(mesh.tp, model, sequence_parallel)
    reduce_tied_embedding_grad(model, mesh)


def _all_reduce_partial_grads(axis: Axis, model: ModelParts, sequence_parallel: bool) -> None:
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
    """This rank's parts, in the model's order: the same on every tensor-parallel rank."""
    return [
        to_local_no_grad(parameter.grad)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.grad is not None and get_param_layout(module, name).is_partial(ranks, sequence_parallel)
    ]
