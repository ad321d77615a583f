"""Data parallelism: ZeRO 0 to 3 and HSDP as a table of `fully_shard` switches."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megalaunch.config.schema.parallel import DataSharding
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.parallel.gloo import ExchangeReduceScatter


@dataclass(frozen=True)
class Switches:
    """What a sharding strategy means to FSDP2.

    `reshard_after_forward`: parameters are freed after use and gathered again for the backward pass.
    `sync_every_microbatch`: gradients are reduced, and held sharded, after each microbatch and not once a step.
    """

    reshard_after_forward: bool
    sync_every_microbatch: bool


# no_shard differs from optim by its mesh only: all ranks are replicas of one shard (plan.topology).
SWITCHES: dict[DataSharding, Switches] = {
    "no_shard": Switches(reshard_after_forward=False, sync_every_microbatch=False),
    "optim": Switches(reshard_after_forward=False, sync_every_microbatch=False),
    "optim_grads": Switches(reshard_after_forward=False, sync_every_microbatch=True),
    "optim_grads_params": Switches(reshard_after_forward=True, sync_every_microbatch=True),
}


def shard(model: Decoder, mesh: Mesh, strategy: DataSharding, precision: MixedPrecisionPolicy) -> None:
    """Shard every layer and the rest as one unit each, in place; also at dp=1, so that one code path serves all."""
    for layer in model.layers.values():
        fully_shard(
            layer,
            mesh=mesh.data_parallel,
            reshard_after_forward=SWITCHES[strategy].reshard_after_forward and mesh.pp.size == 1,
            mp_policy=precision,
        )
    # The root's tensors are needed at both ends of the pass; freeing them between would only cost time.
    fully_shard(model, mesh=mesh.data_parallel, reshard_after_forward=False, mp_policy=precision)
    for unit in units(model):
        # The loss is divided by the global token count already: gradients are summed, not averaged.
        # Gloo knows no pre-multiplied sum, hence the forced plain one.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        if mesh.device.type == "cpu":
            unit.set_custom_reduce_scatter(ExchangeReduceScatter())


def units(model: Decoder) -> list[FSDPModule]:
    """Every separately sharded part of the model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def announce_microbatch(model: Decoder, strategy: DataSharding, last: bool) -> None:
    """Before each microbatch of a sharded model: reduce its gradients, or only add them up until the `last`?"""
    if SWITCHES[strategy].sync_every_microbatch:
        return
    assert isinstance(model, FSDPModule), "fully_shard makes it one, in place"
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def release(model: Decoder) -> None:
    """Free gathered parameters after a forward pass that no backward pass follows.

    Without it `model.parameters()` would yield the gathered copies, unknown to the optimizer.
    """
    for unit in units(model):
        unit.reshard()
