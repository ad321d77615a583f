"""Data parallelism: ZeRO 0 to 3 and HSDP as a table of `fully_shard` switches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megalaunch.config.schema.parallel import DataSharding, ParallelSpec
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.parallel.gloo_reduce_scatter import AllToAllReduceScatter, LocalReduceScatter


@dataclass(frozen=True)
class FSDPOptions:
    """What a sharding strategy means to FSDP2.

    `reshard_after_forward`: parameters are freed after use and gathered again for the backward pass.
    `sync_every_microbatch`: gradients are reduced, and held sharded, after each microbatch and not once a step.
    """

    reshard_after_forward: bool
    sync_every_microbatch: bool


# no_shard differs from optim by its mesh only: all ranks are replicas of one shard (plan.topology).
ZERO_STAGES: dict[DataSharding, FSDPOptions] = {
    "no_shard": FSDPOptions(reshard_after_forward=False, sync_every_microbatch=False),
    "optim": FSDPOptions(reshard_after_forward=False, sync_every_microbatch=False),
    "optim_grads": FSDPOptions(reshard_after_forward=False, sync_every_microbatch=True),
    "optim_grads_params": FSDPOptions(reshard_after_forward=True, sync_every_microbatch=True),
}


def apply_fsdp(
    model: Decoder, mesh: Mesh, parallel: ParallelSpec, precision: MixedPrecisionPolicy, reduce: torch.dtype
) -> None:
    """Shard every layer and the rest as one unit each, in place; also at dp=1, so that one code path serves all.

    Microbatches are added up in the format of the policy, and ranks exchange the sums in `reduce`.

    There, where no copy in another format is needed either, a unit has no parameters to care for: torch would copy
    weights and gradients within the one rank, which took a tenth of a small step.
    """
    alone = mesh.fsdp_mesh.size() == 1 and precision.param_dtype == torch.float32
    for layer in model.layers.values():
        fully_shard(
            layer,
            mesh=mesh.fsdp_mesh,
            reshard_after_forward=ZERO_STAGES[parallel.data_sharding].reshard_after_forward and mesh.pp.size == 1,
            mp_policy=precision,
            ignored_params=set(layer.parameters()) if alone else None,
        )
    # The root's tensors are needed at both ends of the pass; freeing them between would only cost time.
    fully_shard(
        model,
        mesh=mesh.fsdp_mesh,
        reshard_after_forward=False,
        mp_policy=precision,
        ignored_params=set(model.parameters()) if alone else None,
    )
    for unit in fsdp_modules(model):
        # The loss is divided by the global token count already: gradients are summed, not averaged.
        # Gloo knows no pre-multiplied sum, hence the forced plain one.
        unit.set_force_sum_reduction_for_comms(True)
        if mesh.fsdp_mesh.size() > 1:  # one rank's gradients would be copied to be divided by 1
            unit.set_gradient_divide_factor(1.0)
            _set_reduce_dtype(unit, reduce)
        if mesh.device.type == "cpu":
            several = mesh.fsdp_mesh.size() > 1
            unit.set_custom_reduce_scatter(AllToAllReduceScatter() if several else LocalReduceScatter())
    _set_prefetch_order(model, mesh, parallel.overlap_param_gather)


def _set_reduce_dtype(unit: FSDPModule, reduce: torch.dtype) -> None:
    """Let a unit's gradients cross in a format of their own.

    FSDP2 has one `reduce_dtype` for the sum over microbatches and that over ranks; with the compute format, or a
    narrower one, it would round after every microbatch. Its parameters keep the first, its group gets the second when
    FSDP2 has found out its formats, in the first forward pass.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:  # no parameters of its own
        return
    find_out = group._init_mp_dtypes

    def found_out() -> None:
        find_out()
        group._reduce_dtype = reduce

    group._init_mp_dtypes = found_out  # type: ignore[method-assign]


def _set_prefetch_order(model: Decoder, mesh: Mesh, overlap: bool) -> None:
    """Gather the next unit's parameters while this one computes, or each unit's when its turn comes.

    FSDP2 has two ways to gather: on CUDA streams of its own, beside whatever computes, or in the order of the calls,
    on a thread of the process group. Processors have no streams; and a gather that is to wait must not run on one.
    """
    in_forward_order = fsdp_modules(model)  # the root first: it holds the embedding
    assert isinstance(model, FSDPModule), "fully_shard makes it one, in place"
    model._set_unshard_async_op(mesh.device.type == "cpu" or not overlap)
    if overlap:
        for unit, following in pairwise(in_forward_order):
            unit.set_modules_to_forward_prefetch([following])
        return
    for unit in in_forward_order:
        unit.set_modules_to_backward_prefetch([unit])  # itself, already there: else the one before it would be gathered


def fsdp_modules(model: Decoder) -> list[FSDPModule]:
    """Every separately sharded part of the model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_grad_sync(model: Decoder, parallel: ParallelSpec, last: bool) -> None:
    """Before each microbatch of a sharded model: reduce its gradients, or only add them up until the `last`?

    Replicas of a sharded model exchange their sums once a step, whatever the strategy.
    """
    assert isinstance(model, FSDPModule), "fully_shard makes it one, in place"
    every = ZERO_STAGES[parallel.data_sharding].sync_every_microbatch
    model.set_requires_gradient_sync(parallel.overlap_grad_reduce and (last or every))
    model.set_requires_all_reduce(last)  # after the line above, which sets it too
    model.set_reshard_after_backward(last or every)


def reduce_grads_if_due(model: Decoder, parallel: ParallelSpec, last: bool) -> None:
    """After each backward pass: what `overlap_grad_reduce` did during it is done now when that is off."""
    every = ZERO_STAGES[parallel.data_sharding].sync_every_microbatch
    if (last or every) and not parallel.overlap_grad_reduce:
        assert isinstance(model, FSDPModule), "fully_shard makes it one, in place"
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(last)
        # What FSDP2 runs at the end of a backward pass, for the units that were not reduced in it: now all of them.
        model._get_fsdp_state()._root_post_backward_final_callback()
    if parallel.dp_replicate > 1 and not last:
        _widen_partial_sums(model)


def _widen_partial_sums(model: Decoder) -> None:
    """What replicas of a sharded model have summed over shards waits for the last microbatch in the parameters' format.

    FSDP2 adds it up in the format in which it was exchanged.
    """
    for unit in fsdp_modules(model):
        group = unit._get_fsdp_state()._fsdp_param_group
        if group is not None and group._partial_reduce_output is not None:
            group._partial_reduce_output = group._partial_reduce_output.to(group._orig_dtype)


def reshard(model: Decoder) -> None:
    """Free gathered parameters after a forward pass that no backward pass follows.

    Without it `model.parameters()` would yield the gathered copies, unknown to the optimizer.
    """
    for unit in fsdp_modules(model):
        unit.reshard()
