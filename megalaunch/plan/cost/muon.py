"""Time of Muon's Newton-Schulz iterations, and of the exchanges that gather and scatter its matrices.

Ranks that share n matrices take them in batches of one a rank, the largest first; a batch lasts as long as its largest.
"""

from __future__ import annotations

from collections import defaultdict

from megalaunch.plan.cost import constants as c
from megalaunch.plan.cost.communication import Interconnect, activation_bytes
from megalaunch.plan.cost.layer import Device, matmul_seconds
from megalaunch.plan.hidden_matrices import HiddenMatrix, hidden_matrices
from megalaunch.plan.stage_params import DataShards, VirtualStage
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec

_LAUNCHES = 3  # of one iteration


def muon_seconds(
    spec: RunSpec, topology: Topology, device: Device, wires: Interconnect, chunks: tuple[VirtualStage, ...]
) -> float:
    """Return the seconds of Muon on one pipeline rank beyond an elementwise update: iterations and exchanges."""
    shards = DataShards.from_topology(topology)
    groups = spec.model.num_query_groups or spec.model.num_attention_heads
    by_ranks: dict[tuple[int, int], list[float]] = defaultdict(list)  # (data-parallel, tensor-parallel) -> seconds
    values: dict[tuple[int, int], float] = defaultdict(float)
    for kind, layers in (pair for chunk in chunks for pair in chunk.kinds):
        for matrix in hidden_matrices(spec.model, kind):
            count: float = layers * matrix.count
            over = {"tp": topology.tp, "groups": min(topology.tp, groups), "replicated": 1, "experts": topology.etp}
            ranks = shards.dense, over[matrix.sharding]
            if matrix.sharding == "experts":  # whole experts are sharded, each of them is where it is
                count /= topology.ep * shards.experts
                ranks = 1, topology.etp
            by_ranks[ranks] += [_iterations(matrix, spec, device)] * max(1, round(count))
            values[ranks] += count * matrix.rows * matrix.columns
    seconds = 0.0
    for (data, tensor), times in by_ranks.items():
        batches = sorted(times, reverse=True)[:: data * tensor]
        seconds += sum(batches)
        volume = values[data, tensor] / (data * tensor) * activation_bytes(spec)
        for size, stride in ((data, topology.tp), (tensor, 1)):
            if size > 1:
                latency = (len(batches) - 1) * wires.latency(size, stride)
                seconds += 2 * (wires.all_to_all(volume, size, stride) + latency)
    return seconds


def _iterations(matrix: HiddenMatrix, spec: RunSpec, device: Device) -> float:
    """Return the seconds to orthogonalize one matrix: Gram matrix, its square, and their product with it."""
    short, long = sorted((matrix.rows, matrix.columns))
    sizes = ((short, long, short), (short, short, short), (short, short, long))
    one = sum(matmul_seconds(rows, inner, columns, device.head_flops) for rows, inner, columns in sizes)
    return spec.optimizer.muon_num_ns_steps * max(one, _LAUNCHES * c.HOST_LAUNCH.value)
