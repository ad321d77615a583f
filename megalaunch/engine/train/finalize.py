"""Once a step, before clipping: gradients that are parts of a sum over tensor-parallel ranks or stages are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.engine.collectives import start_sum
from megalaunch.engine.layout import layout_of
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.parallel.tied import add_tied_gradient
from megalaunch.engine.placement import local_values


@torch.no_grad()
def finalize(model: ModelParts, mesh: Mesh, sequence_parallel: bool) -> None:
    """Norms under sequence parallelism, and key/value heads that ranks share: one all-reduce in fp32; tied heads."""
    _sum_over(mesh.tp, model, sequence_parallel)
    add_tied_gradient(model, mesh)


def _sum_over(axis: Axis, model: ModelParts, sequence_parallel: bool) -> None:
    if axis.size == 1:
        return
    partial = _partial_gradients(model, axis.size, sequence_parallel)
    if not partial:
        return
    flat = torch.cat([gradient.flatten().float() for gradient in partial])
    sizes = [gradient.numel() for gradient in partial]
    summed = torch.split(start_sum(flat, axis).wait(), sizes)
    for gradient, total in zip(partial, summed, strict=True):
        gradient.copy_(total.view_as(gradient))


def _partial_gradients(model: ModelParts, ranks: int, sequence_parallel: bool) -> list[Tensor]:
    """This rank's parts, in the model's order: the same on every tensor-parallel rank."""
    return [
        local_values(parameter.grad)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.grad is not None and layout_of(module, name).is_partial(ranks, sequence_parallel)
    ]
