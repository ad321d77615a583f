"""Activations in host memory (`recompute.cpu_offloading_num_layers`): those of the first layers of a virtual stage."""

from __future__ import annotations

from megalaunch.plan.activation_layers import offloaded_layers
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups
from megalaunch.plan.memory.in_flight import in_flight
from megalaunch.plan.memory.profiles import profile_for
from megalaunch.plan.memory.saved_activations import saved_bytes
from megalaunch.plan.stage_params import VirtualStage, chunks_by_rank
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec


def offloaded_bytes(spec: RunSpec, topology: Topology, chunk: VirtualStage) -> float:
    """Return the bytes that a virtual stage copies to the host in the forward pass of one microbatch."""
    dtypes, profile = DtypesAndGroups.from_spec(spec), profile_for(spec)
    size = sum(
        layers * saved_bytes(spec.model, kind, dtypes, profile).without_recompute
        for kind, layers in offloaded_layers(spec.recompute, chunk)
    )
    return size * topology.micro_batch_size * spec.batch.sequence_length / topology.cp


def offloaded_bytes_per_node(spec: RunSpec) -> float:
    """Return the bytes of the microbatches in flight that the devices of a node hold in host memory.

    Every device of the node counts as the pipeline rank with most.

    Raises:
        ValueError: the spec is open, or a degree does not divide (StageError for stages).
    """
    if not spec.recompute.cpu_offloading_num_layers:
        return 0.0
    topology, parallel, most = Topology.from_spec(spec), spec.parallel, 0.0
    group = parallel.microbatch_group_size_per_vp_stage or topology.pp
    for rank, chunks in enumerate(chunks_by_rank(spec)):
        counts = in_flight(parallel.schedule, topology.pp, len(chunks), rank, topology.microbatches, group)
        sizes = (offloaded_bytes(spec, topology, chunk) for chunk in chunks)
        most = max(most, sum(size * count for size, count in zip(sizes, counts, strict=True)))
    return most * topology.devices_per_node
