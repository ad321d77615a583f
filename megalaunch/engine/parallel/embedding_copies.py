"""Copies of the embedding's matrix E on later pipeline stages: for MTP depths, and of a tied head.

Once a step:               dE = dE_embedding + sum of dE_copy   (send/recv from each copy's stage to the first)
After the optimizer step:  E_copy = E                           (send/recv from the first stage to each copy's)

Only the first stage has optimizer states for E. Both transfers of a copy together are as large as an all-reduce of the
gradient, which would need optimizer states on both stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.plan.stages import build_stages
from megalaunch.schema import RunSpec

_FIRST = 0  # the pp rank of the embedding, under every schedule


def embedding_copy_ranks(spec: RunSpec) -> list[int]:
    """Return the pp rank of every stage that holds a copy of the embedding, in order."""
    tied = spec.model.tie_word_embeddings
    return [stage.rank for stage in build_stages(spec) if not stage.embedding and (stage.mtp or (stage.head and tied))]


@torch.no_grad()
def reduce_embedding_grads(model: ModelParts, mesh: Mesh) -> None:
    """Once a step: add the gradients of the copies to that of the embedding, and free them. Collective over pp."""
    source, copies = model.embedding_weight, iter(model.embedding_copies)
    for rank in model.copy_ranks:
        copy = next(copies) if rank == mesh.pp.rank else None
        gradient = None
        if copy is not None:
            assert copy.grad is not None, "the copy is in every backward pass"
            gradient = to_local_no_grad(copy.grad).contiguous()
            copy.grad = None
            if source is None:
                dist.send(gradient, group=mesh.pp_group, group_dst=_FIRST)
        if source is not None:
            assert source.grad is not None, "the embedding is in every backward pass"
            target = to_local_no_grad(source.grad)
            if gradient is None:
                gradient = torch.empty_like(target, memory_format=torch.contiguous_format)
                dist.recv(gradient, group=mesh.pp_group, group_src=rank)
            target.add_(gradient)


@torch.no_grad()
def broadcast_embedding(model: ModelParts, mesh: Mesh) -> None:
    """After weights have changed: copy the embedding's matrix to its copies. Collective over pp."""
    source, copies = model.embedding_weight, iter(model.embedding_copies)
    for rank in model.copy_ranks:
        copy = next(copies) if rank == mesh.pp.rank else None
        if source is not None and copy is not None:
            to_local_no_grad(copy).copy_(to_local_no_grad(source))
        elif source is not None:
            dist.send(to_local_no_grad(source).contiguous(), group=mesh.pp_group, group_dst=rank)
        elif copy is not None:
            values = torch.empty_like(to_local_no_grad(copy), memory_format=torch.contiguous_format)
            dist.recv(values, group=mesh.pp_group, group_src=_FIRST)
            to_local_no_grad(copy).copy_(values)
