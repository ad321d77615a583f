"""Optimizer states in the host memory of a node (`optimizer.optimizer_offload_fraction`)."""

from __future__ import annotations

from megalaunch.plan.memory.model_states import states_per_parameter
from megalaunch.plan.memory.param_bytes import main_param_bytes, moment_bytes
from megalaunch.plan.stage_params import DataShards, params_by_rank
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec


def host_bytes_per_node(spec: RunSpec) -> float:
    """Return the bytes that the devices of a node offload: states, and pinned buffers of weights and gradients.

    Every device of the node counts as the pipeline rank with most parameters.

    Raises:
        ValueError: the spec is open, or a degree does not divide (StageError for stages).
    """
    fraction = spec.optimizer.optimizer_offload_fraction
    if not fraction:
        return 0.0
    topology = Topology.from_spec(spec)
    shards = DataShards.from_topology(topology)
    ranks = params_by_rank(spec, topology.tp, topology.ep * topology.etp)
    updated = max(shards.of(params) - params.copies / shards.dense for params in ranks)
    states = states_per_parameter(spec.optimizer) * moment_bytes(spec)
    return fraction * updated * (states + 2 * main_param_bytes(spec)) * topology.devices_per_node
