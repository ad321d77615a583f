"""Data parallelism: ZeRO 0 to 3 and HSDP as a table of `fully_shard` (FSDP2) switches.

Each unit's parameters W (every layer, and the rest of the model) are sharded over dp_shard and replicated over
dp_replicate; the data-parallel axis includes cp, whose ranks hold the same parameters. With the shard W_r of rank r

Forward:   W = all_gather(W_r), y = f(x_r, W)
Backward:  dW_r = reduce_scatter(dW) over dp_shard, then with replicas dW_r = all_reduce(dW_r) over dp_replicate

With `overlap_param_gather` a unit's all-gather overlaps with the computation of the unit before it; with
`overlap_grad_reduce` gradients are reduced during the backward pass, else after it.

With `outer_steps` there is no all-reduce over dp_replicate: replicas train apart (`optimizer/outer_optimizer.py`).

The strategy decides when. ZeRO-1 all-gathers W and reduces dW once a step; ZeRO-0 has nothing to all-gather. ZeRO-2
reduces dW once a microbatch; ZeRO-3 also frees W after forward and after backward, and all-gathers it before both. A
pipeline does so in each of its stages (`pipeline_sharding.py`). Optimizer states are sharded like W_r.

Routed experts are held by edp ranks, not by all dp and cp ranks: they are sharded over edp_shard and replicated over
edp_replicate. They belong to the unit of their layer, on a mesh of their own (`shard_placement_fn`), and not to a unit
inside it, whose hooks would run again in recomputation, would break a compiled layer's graph, and would prefetch in
another order. The unit all-gathers and reduces once for each mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.multi_token import MultiTokenDepth
from megalaunch.engine.param_layout import expert_params
from megalaunch.engine.torch_private import (
    fsdp_placement,
    run_fsdp_post_backward,
    set_fsdp_async_all_gather,
    set_fsdp_reduction,
    widen_fsdp_partial_sum,
)
from megalaunch.schema.parallel import DataSharding, ParallelSpec


@dataclass(frozen=True)
class FSDPOptions:
    """The FSDP2 switches of a sharding strategy.

    `reshard_after_forward`: parameters are freed after forward and all-gathered again in backward.
    `sync_every_microbatch`: gradients are reduce-scattered, and held sharded, after each microbatch, not once a step.
    """

    reshard_after_forward: bool
    sync_every_microbatch: bool


# no_shard differs from optim only by its mesh: dp_shard has the context-parallel ranks alone (plan.topology).
ZERO_STAGES: dict[DataSharding, FSDPOptions] = {
    "no_shard": FSDPOptions(reshard_after_forward=False, sync_every_microbatch=False),
    "optim": FSDPOptions(reshard_after_forward=False, sync_every_microbatch=False),
    "optim_grads": FSDPOptions(reshard_after_forward=False, sync_every_microbatch=True),
    "optim_grads_params": FSDPOptions(reshard_after_forward=True, sync_every_microbatch=True),
}


def apply_fsdp(
    model: Decoder, mesh: Mesh, parallel: ParallelSpec, precision: MixedPrecisionPolicy, reduce: torch.dtype
) -> None:
    """Apply `fully_shard` to every layer, every MTP depth and the rest of the model, in place.

    On one rank too, for one code path. In a mesh of one rank FSDP2 ignores parameters that have the dtype of compute
    already: it would copy weights and gradients within the rank, which took a tenth of a small step.

    Args:
        model: a decoder, after tensor parallelism, activation checkpointing and compilation.
        mesh: gives the axes (dp_shard) or (dp_replicate, dp_shard).
        parallel: the sharding strategy and the overlap switches.
        precision: FSDP2's policy: compute dtype, and dtype of the gradient accumulation over microbatches.
        reduce: dtype of the reduction of gradients over ranks.
    """
    frees = ZERO_STAGES[parallel.data_sharding].reshard_after_forward
    for layer in (*model.layers.values(), *model.mtp.values()):
        _shard_unit(layer, mesh, precision, reshard_after_forward=frees)
    # The root's parameters (embedding, head) are used at both ends of a pass: freeing them between would cost a second
    # all-gather.
    _shard_unit(model, mesh, precision, reshard_after_forward=False)
    for unit in fsdp_modules(model):
        # The loss is already divided by the global token count: gradients are summed over ranks, not averaged.
        # gloo does not support the pre-multiplied sum of NCCL, so a plain sum is forced.
        unit.set_force_sum_reduction_for_comms(True)
        # FSDP2 has one `reduce_dtype` for gradient accumulation over microbatches and for the reduction over ranks;
        # with the compute dtype, or a narrower one, it would round after every microbatch.
        set_fsdp_reduction(unit, reduce, _gloo_reduce_scatter if mesh.uses_gloo else None)
    _set_prefetch_order(model, mesh, parallel.overlap_param_gather)
    if mesh.pp.size > 1 and frees and parallel.overlap_param_gather:
        _prefetch_in_backward(model)


def _shard_unit(unit: nn.Module, mesh: Mesh, precision: MixedPrecisionPolicy, *, reshard_after_forward: bool) -> None:
    """Apply `fully_shard` to a module: routed experts over edp, everything else over dp and cp."""
    experts = expert_params(unit)
    computes_with_shards = all(_computes_with(parameter, precision) for parameter in unit.parameters())
    ignored: set[nn.Parameter] = set()
    if computes_with_shards and mesh.fsdp_mesh.size() == 1:
        ignored |= set(unit.parameters()) - experts.keys()
    if computes_with_shards and mesh.expert_fsdp_mesh.size() == 1:
        ignored |= experts.keys()
    place_on_mesh = fsdp_placement(mesh.expert_fsdp_mesh) if experts and mesh.expert_mesh is not None else None

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return None
        placement = _expert_placement(to_local_no_grad(parameter).shape, mesh.expert_fsdp_mesh.shape[-1])
        return placement if place_on_mesh is None else place_on_mesh(placement)

    fully_shard(
        unit,
        mesh=mesh.fsdp_mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=precision,
        ignored_params=ignored or None,
        shard_placement_fn=place if experts else None,
    )


def _computes_with(parameter: nn.Parameter, precision: MixedPrecisionPolicy) -> bool:
    """Return whether a parameter and its gradient need no copy in another dtype: fp32 accumulates bf16 gradients."""
    dtype = parameter.dtype
    return precision.param_dtype == dtype and dtype in (torch.float32, precision.reduce_dtype)


def _expert_placement(shape: Sequence[int], shards: int) -> Shard:
    """Shard whole experts, or if there are too few of them (shape [E, ...]) the first dim that is divisible."""
    return Shard(next((dim for dim, size in enumerate(shape) if size % shards == 0), 0))


def _gloo_reduce_scatter(ranks: int) -> AllToAllReduceScatter:
    """Return the reduce-scatter for a mesh of so many ranks on CPUs."""
    return AllToAllReduceScatter() if ranks > 1 else LocalReduceScatter()


def _set_prefetch_order(model: Decoder, mesh: Mesh, overlap: bool) -> None:
    """All-gather the next unit's parameters while a unit computes (`overlap`), or each unit's only when it runs.

    FSDP2 has two ways to all-gather: on CUDA streams of its own, overlapping with any computation, or as an async
    operation of the process group, in call order. CPUs have no streams, and without overlap the all-gather must not
    run on a separate stream: both take the second way.
    """
    in_forward_order = fsdp_modules(model)  # starts with the root, which holds the embedding
    assert isinstance(model, FSDPModule), "fully_shard makes it one, in place"
    set_fsdp_async_all_gather(model, mesh.uses_gloo or not overlap)
    if overlap:
        for unit, following in pairwise(in_forward_order):
            if not isinstance(following, MultiTokenDepth):  # evaluation and generation do not run it
                unit.set_modules_to_forward_prefetch([following])
        return
    for unit in in_forward_order:
        # The unit itself, which is gathered already: with an empty list FSDP2 prefetches the preceding unit.
        unit.set_modules_to_backward_prefetch([unit])


def _prefetch_in_backward(model: Decoder) -> None:
    """Name the unit that a backward pass all-gathers while a unit computes.

    FSDP2 takes it from the order of the last forward passes, which it forgets at the end of a backward pass: in a
    pipeline, those of microbatches that are still in flight.
    """
    layers = fsdp_modules(model)[1:]  # without the root, which stays gathered between forward and backward
    for previous, unit in pairwise((*layers[:1], *layers)):
        unit.set_modules_to_backward_prefetch([previous])


def fsdp_modules(model: Decoder) -> list[FSDPModule]:
    """Return the FSDP units of a model: its root, its layers and its MTP depths."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_grad_sync(model: Decoder, parallel: ParallelSpec, last: bool) -> None:
    """Set before each microbatch whether its backward pass reduces gradients or only accumulates them.

    The reduce-scatter over dp_shard runs in every microbatch or in the `last`, as the strategy says; the all-reduce
    over dp_replicate (HSDP) runs once a step, whatever the strategy.
    """
    assert isinstance(model, FSDPModule), "fully_shard makes it one, in place"
    options = ZERO_STAGES[parallel.data_sharding]
    model.set_requires_gradient_sync(parallel.overlap_grad_reduce and (last or options.sync_every_microbatch))
    model.set_requires_all_reduce(last)  # must follow set_requires_gradient_sync, which sets it too
    model.set_reshard_after_backward(last or options.reshard_after_forward)  # else gathered once a step


def reduce_grads_if_due(model: Decoder, parallel: ParallelSpec, last: bool) -> None:
    """After each backward pass: reduce the gradients now if `overlap_grad_reduce` is off and a reduction is due."""
    if (last or ZERO_STAGES[parallel.data_sharding].sync_every_microbatch) and not parallel.overlap_grad_reduce:
        reduce_grads(model, last)
    _widen_partial_sums(model, parallel, last)


def reduce_grads(model: Decoder, last: bool) -> None:
    """Reduce the gradients of all units that were not reduced during the backward pass.

    FSDP2 calls the collectives: a reduce-scatter over dp_shard and, if `last`, an all-reduce over dp_replicate.
    """
    assert isinstance(model, FSDPModule), "fully_shard makes it one, in place"
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(last)
    run_fsdp_post_backward(model)


def _widen_partial_sums(model: Decoder, parallel: ParallelSpec, last: bool) -> None:
    """Keep what the microbatches so far have reduced over dp_shard in the dtype of gradient accumulation.

    FSDP2 would accumulate reduce-scattered gradients over microbatches in the dtype of the reduction.
    """
    if parallel.dp_replicate > 1 and not parallel.outer_steps and not last:
        for unit in fsdp_modules(model):
            widen_fsdp_partial_sum(unit)


def reshard(model: Decoder) -> None:
    """Free the all-gathered parameters after a forward pass without a backward pass.

    Otherwise `model.parameters()` would yield the unsharded copies, which the optimizer does not hold.
    """
    for unit in fsdp_modules(model):
        unit.reshard()


class AllToAllReduceScatter:
    """Reduce-scatter of gloo for FSDP2's `set_custom_reduce_scatter`, by an all-to-all and a local sum in rank order.

    gloo's own reduce-scatter all-reduces the whole tensor and keeps a part. An all-to-all of the parts and a local sum
    send half the bytes: between two processes on one machine, 6.0 ms against 13.5 ms for 2.1 million fp32 numbers.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write to rank r's output the sum over ranks of their r-th parts: flat [n * size] -> flat [n]."""
        assert op == dist.ReduceOp.SUM, "gradients are summed: the loss is divided before the backward pass"
        assert not async_op, "a CPU has no streams to wait on"
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)


class LocalReduceScatter(AllToAllReduceScatter):
    """Reduce-scatter for world size 1: input and output share one buffer, as the sum is the input.

    FSDP2 communicates nothing at world size 1 and copies the input buffer to the output: here onto itself.
    """

    def __init__(self) -> None:
        self._given: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer for the input, and the same buffer for the output, which FSDP2 allocates next."""
        given, self._given = self._given, None
        if given is None:
            given = self._given = super().allocate(size, dtype=dtype, device=device)
        return given
