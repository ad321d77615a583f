"""Weights, gradients and optimizer states on one device, by phase of a step: the states that data parallelism shards.

ZeRO (Rajbhandari et al. 2020) in FSDP2's form; `engine/parallel/fsdp.py` has the table of strategies.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema import RunSpec
from megalaunch.plan.memory.layer_dims import dtype_bytes
from megalaunch.plan.memory.profiles import MemoryProfile
from megalaunch.plan.stage_params import DeviceParams
from megalaunch.plan.topology import Topology

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1}
"""States (moments) of an optimizer per weight."""
_BYTES = {"fp32": 4, "bf16": 2}
GATHERED_UNITS = 2
"""Layers gathered at once by optim_grads_params: the one that computes, and the next one, prefetched."""


@dataclass(frozen=True)
class MemoryPhase:
    """Bytes on one device in one phase of a step, without optimizer states and activations."""

    weights: float
    gradients: float
    buffers: float = 0.0


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one device.

    Attributes:
        loss: during the backward of the loss.
        layer: during the backward of a layer.
        unit: gradients of a layer while they are reduced.
        last: during the backward of the last layer, with the gradients of the layers before it; None with several
            microbatches, where every layer has them.
        between: at the end of the backward of a microbatch that is not the last.
        end: at the end of the last one, when gradients of embedding and head are reduced.
    """

    optimizer: float
    loss: MemoryPhase
    layer: MemoryPhase
    unit: float
    last: MemoryPhase | None
    between: MemoryPhase | None
    end: MemoryPhase


def model_states(
    spec: RunSpec, topology: Topology, held: DeviceParams, accounting: MemoryProfile, in_flight: int = 1
) -> ModelStates:
    """Return the states of one rank's parameters, with at most `in_flight` microbatches in flight."""
    whole = spec.parallel.data_sharding == "no_shard"
    shards = 1 if whole else topology.dp_shard * topology.cp
    expert_shards = 1 if whole else max(1, topology.edp // spec.parallel.dp_replicate)
    divided = held.dense / shards + held.experts / expert_shards
    on_device = 1 - spec.optimizer.optimizer_offload_fraction
    moments = MOMENTS[spec.optimizer.name] * _BYTES[spec.precision.exp_avg_dtype] * on_device
    if accounting.sharded_master and topology.dp * topology.cp == 1 and _computes_with_master(spec):
        return _single_rank(spec, held, topology, moments, in_flight)
    if accounting.sharded_master:
        return _shard(spec, topology, held, accounting, divided, shards, moments, in_flight)
    optimizer = moments if _computes_with_master(spec) else moments + master_bytes(spec) * on_device
    return _full_weights(spec, held, divided, optimizer, accounting)


def master_bytes(spec: RunSpec) -> int:
    """Return the bytes of a master weight (main parameter)."""
    return _BYTES[spec.precision.main_params_dtype]


def _computes_with_master(spec: RunSpec) -> bool:
    """Return whether master weights have the compute dtype, so that no copies are needed."""
    return spec.precision.compute_dtype == spec.precision.main_params_dtype


def _shard(
    spec: RunSpec,
    topology: Topology,
    held: DeviceParams,
    accounting: MemoryProfile,
    divided: float,
    shards: int,
    moments: float,
    in_flight: int,
) -> ModelStates:
    """FSDP2: sharded master weights, from which copies in the compute dtype are all-gathered.

    A pipeline keeps full copies and gradients until its end for any strategy: its stages reduce once per step.
    """
    copy = dtype_bytes(spec.precision.compute_dtype)
    if spec.precision.compute_dtype == "fp8" and spec.precision.fp8.param_gather:
        copy = 1
    added = _BYTES[spec.precision.grad_dtype]
    sharding, pipelined = spec.parallel.data_sharding, topology.pp > 1
    divides = shards == 1 and topology.dp * topology.cp > 1  # every rank is a replica
    exchanged = shards > 1 or divides
    reduced = min(_BYTES[spec.precision.grad_reduce_dtype], added) if exchanged else added
    apart = accounting.parts_apart and shards > 1
    copies = 2 if divides or apart else 1
    adds_up = pipelined or sharding in ("no_shard", "optim")  # full gradients until the last microbatch
    several = topology.microbatches > 1
    every, width = held.dense + held.experts, master_bytes(spec)
    master = summed = width * divided  # FSDP2 keeps reduced gradients in the dtype of the parameters
    before = 0.0  # no gradients yet while all microbatches are in flight
    if topology.microbatches > in_flight:
        before = added * every if adds_up else summed
    gathered = loss_gathered = every
    if sharding == "optim_grads_params" and not pipelined:
        loss_gathered = held.root
        gathered = min(every, held.root + GATHERED_UNITS * held.layer)
    between = MemoryPhase(master + copy * every, added * every, copy * held.root) if several and adds_up else None
    if pipelined:  # embedding and head are reduced first, while all layers' gradients are still full
        summing = _grad_reduce_buffer(added, reduced, width, shards, copies, adds=False)
        moving = held.root * max(added, summing + width / shards - added)
        end = MemoryPhase(master + copy * (every - held.root), added * every, moving)
    else:
        source = added if several and adds_up else copy
        adds = several and not adds_up
        moving = held.root * _grad_reduce_buffer(source, reduced, width, shards, copies, adds=adds)
        replicated = topology.dp_replicate > 1 or (sharding == "no_shard" and topology.dp * topology.cp > 1)
        if replicated and reduced != width:  # buffers of the replicas' all-reduce are held until the end of the pass
            moving += reduced * divided
        end = MemoryPhase(master, summed, moving)
    unit = reduced if not (adds_up and several) else copy + (0 if before else added)
    return ModelStates(
        optimizer=moments * divided,
        loss=MemoryPhase(master + copy * loss_gathered, before),
        layer=MemoryPhase(master + copy * gathered, before, copy * held.head),
        unit=held.layer * (unit + (reduced if apart else 0)),
        last=None
        if several or pipelined
        else MemoryPhase(master + copy * gathered, summed * _finished_grad_fraction(held)),
        between=between,
        end=end,
    )


def _grad_reduce_buffer(source: int, reduced: int, kept: int, shards: int, copies: int, *, adds: bool) -> float:
    """Return the bytes per parameter of the buffers of a reduce-scatter, in addition to its result of `kept` bytes.

    Gradients are first copied from `source` bytes to `reduced` bytes, then summed with `copies` buffers alive: two if
    all ranks are replicas or if received parts have a buffer of their own; then, with `adds`, accumulated.
    """
    copying = source + reduced - kept / shards
    summing = reduced * copies + (reduced / shards if adds else 0.0)
    return max(copying, summing)


def _single_rank(spec: RunSpec, held: DeviceParams, topology: Topology, moments: float, in_flight: int) -> ModelStates:
    """One data-parallel rank that computes with the master weights; gradients are not copied."""
    every, several = held.dense + held.experts, topology.microbatches > 1
    width = master_bytes(spec)
    gradient = max(width, _BYTES[spec.precision.grad_dtype])
    weights, all_of_them = width * every, gradient * every
    found = topology.microbatches > in_flight  # no gradients yet while all microbatches are in flight
    before = all_of_them if found else 0.0
    return ModelStates(
        optimizer=moments * every,
        loss=MemoryPhase(weights, before),
        layer=MemoryPhase(weights, before, 0.0 if found else gradient * held.head),
        unit=0.0 if found else gradient * held.layer,
        last=None if several else MemoryPhase(weights, all_of_them * _finished_grad_fraction(held)),
        between=MemoryPhase(weights, all_of_them) if several and not found else None,
        end=MemoryPhase(weights, all_of_them, gradient * (held.root - held.head) if several else 0.0),
    )


def _finished_grad_fraction(held: DeviceParams) -> float:
    """Return the fraction of gradients that exist during the last layer's backward: not its own nor the embedding's."""
    return max(0.0, 1 - (held.layer + held.root - held.head) / (held.dense + held.experts))


def _full_weights(
    spec: RunSpec, held: DeviceParams, divided: float, optimizer: float, accounting: MemoryProfile
) -> ModelStates:
    """Full weights and gradients, sharded master weights and moments: Megatron's distributed optimizer."""
    plain = dtype_bytes(spec.precision.compute_dtype)
    weight: float = plain
    if spec.precision.compute_dtype == "fp8":
        weight = accounting.float8_weight_copies + (0 if spec.precision.fp8.param_gather else plain)
    # Embedding and head have no 8-bit copies.
    weights = weight * (held.dense + held.experts - held.root) + plain * held.root
    whole = held.dense + held.experts
    if spec.parallel.data_sharding == "optim_grads_params":
        weights, whole = plain * divided, divided
    phase = MemoryPhase(weights, _BYTES[spec.precision.grad_dtype] * whole)
    return ModelStates(optimizer * divided, phase, phase, 0.0, None, None, phase)
