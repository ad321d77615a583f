"""Weights, gradients and optimizer states on one device: bytes of what data parallelism divides.

ZeRO (Rajbhandari et al. 2020) in FSDP2's form; `engine/parallel/data.py` has the table of switches.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema import RunSpec
from megalaunch.plan.memory.accounting import Accounting
from megalaunch.plan.memory.saved import format_bytes
from megalaunch.plan.shares import Held
from megalaunch.plan.topology import Topology

MASTER = 4
_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1}
_BYTES = {"fp32": 4, "bf16": 2}
_GATHERED_UNITS = 2  # with whole sharding: the unit that computes, and the one gathered ahead of it


@dataclass(frozen=True)
class States:
    """Bytes on one device; `buffers` of one unit's reduction, `root_buffers` of embedding and head's."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    root_buffers: float


def states_of(spec: RunSpec, topology: Topology, held: Held, accounting: Accounting) -> States:
    """The states of one rank's parameters."""
    shards = 1 if spec.parallel.data_sharding == "no_shard" else topology.shards * topology.cp
    expert_shards = 1 if spec.parallel.data_sharding == "no_shard" else max(1, topology.edp // spec.parallel.replicas)
    all_parameters = held.dense + held.experts
    divided = held.dense / shards + held.experts / expert_shards
    on_device = 1 - spec.optimizer.offload_fraction
    moments = _MOMENTS[spec.optimizer.name] * _BYTES[spec.precision.moments] * on_device
    if not accounting.sharded_master:
        return _whole_weights(spec, held, divided, moments + MASTER * on_device, accounting)
    copy, reduced = format_bytes(spec.precision.compute), _BYTES[spec.precision.gradients]
    if spec.precision.compute == "fp8" and spec.precision.fp8.param_gather:
        copy = 1
    sharding = spec.parallel.data_sharding
    whole = sharding == "optim_grads_params"
    gathered = min(all_parameters, held.root + _GATHERED_UNITS * held.layer) if whole else all_parameters
    adds_up = sharding in ("no_shard", "optim") and topology.microbatches > 1
    gradients = reduced * all_parameters if adds_up else MASTER * divided
    unit = (copy + MASTER) if accounting.unit_buffers else 0
    return States(
        weights=MASTER * divided + copy * gathered,
        gradients=gradients,
        optimizer=moments * divided,
        buffers=unit * held.layer,
        root_buffers=unit * held.root,
    )


def _whole_weights(spec: RunSpec, held: Held, divided: float, optimizer: float, accounting: Accounting) -> States:
    """Weights and gradients whole, master weights and moments divided: Megatron's distributed optimizer."""
    plain = format_bytes(spec.precision.compute)
    weight: float = plain
    if spec.precision.compute == "fp8":
        weight = accounting.float8_weight_copies + (0 if spec.precision.fp8.param_gather else plain)
    weights = weight * (held.dense + held.experts - held.root) + plain * held.root  # the ends are not in 8 bits
    whole = held.dense + held.experts
    if spec.precision.compute == "fp32":
        optimizer -= MASTER
    if spec.parallel.data_sharding == "optim_grads_params":
        weights, whole = plain * divided, divided
    return States(
        weights=weights,
        gradients=_BYTES[spec.precision.gradients] * whole,
        optimizer=optimizer * divided,
        buffers=0.0,
        root_buffers=0.0,
    )
