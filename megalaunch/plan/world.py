"""World arithmetic: how devices, parallel degrees and the global batch determine each other.

world = dp x pp x cp x tp for dense layers, and edp x pp x ep x etp for routed experts, over the same ranks;
global batch = micro batch x dp x microbatches. Every quotient is None while an input is open or if it is not an
integer; the rules (plan/rules/parallel.py, plan/rules/batch.py) report why.
"""

from __future__ import annotations

import math

from megalaunch.schema.cluster import ClusterSpec
from megalaunch.schema.parallel import ParallelSpec


def exact_quotient(number: int | None, divisor: int) -> int | None:
    """Return number / divisor if it is a positive integer, else None."""
    if number is None:
        return None
    quotient, rest = divmod(number, divisor)
    return None if rest or not quotient else quotient


def world_size(cluster: ClusterSpec) -> int | None:
    """Return the number of devices, one rank each; None while nodes or devices_per_node is open."""
    nodes, per_node = cluster.nodes, cluster.devices_per_node
    return nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else None


def site_size(cluster: ClusterSpec) -> int | None:
    """Return the devices of one of several sites; None with one site, or if the sites have no equal number of nodes."""
    nodes = cluster.nodes if isinstance(cluster.nodes, int) else None
    per_node = cluster.devices_per_node
    per_site = None if cluster.sites == 1 else exact_quotient(nodes, cluster.sites)
    return per_site * per_node if per_site is not None and isinstance(per_node, int) else None


def resolved_world_size(cluster: ClusterSpec) -> int:
    """Return the world size of a resolved spec. Raises ValueError while it is open."""
    world = world_size(cluster)
    if world is None:
        raise ValueError("cluster.nodes or cluster.devices_per_node is not resolved")
    return world


def model_parallel_size(parallel: ParallelSpec) -> int:
    """Return the devices of one data-parallel rank: tp x pp x cp."""
    return parallel.tp * parallel.pp * parallel.cp


def expert_model_parallel_size(parallel: ParallelSpec) -> int:
    """Return the devices of one expert-data-parallel rank: etp x ep x pp."""
    return (parallel.etp or 1) * parallel.ep * parallel.pp


def data_parallel_size(world: int | None, parallel: ParallelSpec) -> int | None:
    """Return dp = world / (tp x pp x cp)."""
    return exact_quotient(world, model_parallel_size(parallel))


def expert_data_parallel_size(world: int | None, parallel: ParallelSpec) -> int | None:
    """Return edp = world / (etp x ep x pp)."""
    return exact_quotient(world, expert_model_parallel_size(parallel))


def replicas_and_shards(dp: int, parallel: ParallelSpec) -> tuple[int, int | None]:
    """Return (dp_replicate, dp_shard) with dp = dp_replicate x dp_shard; without sharding every rank is a replica."""
    replicas = dp if parallel.data_sharding == "no_shard" else parallel.dp_replicate
    return replicas, exact_quotient(dp, replicas)


def num_microbatches(global_batch_size: int, micro_batch_size: int | None, dp: int | None) -> int | None:
    """Return the microbatches of one rank and step: global batch / (micro batch x dp)."""
    if micro_batch_size is None or dp is None:
        return None
    return exact_quotient(global_batch_size, micro_batch_size * dp)


def smallest_world(parallel: ParallelSpec) -> int:
    """Return the fewest devices over which both grids divide, with `parallel.dp_replicate` replicas."""
    return math.lcm(model_parallel_size(parallel) * parallel.dp_replicate, expert_model_parallel_size(parallel))
