"""Tied embeddings across pipeline stages: the head holds a copy of the embedding's matrix E.

Once a step:               dE = dE_embedding + dE_head   (send/recv from the last stage to the first)
After the optimizer step:  E_head = E                    (send/recv from the first stage to the last)

Only the first stage has optimizer states for E. Both transfers together are as large as an all-reduce of the gradient,
which would need optimizer states on both stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts

_FIRST = 0  # the pp rank of the embedding, under every schedule


@torch.no_grad()
def reduce_tied_embedding_grad(model: ModelParts, mesh: Mesh) -> None:
    """Once a step: add the gradient of the head's copy to that of the embedding, and free it. Collective over pp."""
    if not model.config.tie_word_embeddings or mesh.pp.size == 1:
        return
    source, copy = model.embedding_weight, model.tied_head
    if copy is not None:
        assert copy.grad is not None, "the head is in every backward pass"
        gradient = to_local_no_grad(copy.grad).contiguous()
        copy.grad = None
        if source is None:
            dist.send(gradient, group=mesh.pp_group, group_dst=_FIRST)
    if source is not None:
        assert source.grad is not None, "the embedding is in every backward pass"
        target = to_local_no_grad(source.grad)
        if copy is None:
            gradient = torch.empty_like(target, memory_format=torch.contiguous_format)
            dist.recv(gradient, group=mesh.pp_group, group_src=mesh.last_stage_rank)
        target.add_(gradient)


@torch.no_grad()
def broadcast_tied_embedding(model: ModelParts, mesh: Mesh) -> None:
    """After weights have changed: copy the embedding's matrix to the head's copy. Collective over pp."""
    if not model.config.tie_word_embeddings or mesh.pp.size == 1:
        return
    source, copy = model.embedding_weight, model.tied_head
    if source is not None and copy is not None:
        to_local_no_grad(copy).copy_(to_local_no_grad(source))
    elif source is not None:
        dist.send(to_local_no_grad(source).contiguous(), group=mesh.pp_group, group_dst=mesh.last_stage_rank)
    elif copy is not None:
        values = torch.empty_like(to_local_no_grad(copy), memory_format=torch.contiguous_format)
        dist.recv(values, group=mesh.pp_group, group_src=_FIRST)
        to_local_no_grad(copy).copy_(values)
