"""Resolve the nodes and devices of a run: those of the allocation or of this machine, else the fewest that hold it.

A recipe does not pin its cluster. Where no device of the run's chip is seen (a laptop), a plan assumes whole nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from megalaunch.plan.batch import batch_gcd
from megalaunch.plan.world import model_parallel_size, smallest_world
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine
from megalaunch.schema import RunSpec

Derived = Mapping[str, tuple[Any, str]]
"""By key: (value, reason)."""

_NODES, _PER_NODE = "cluster.nodes", "cluster.devices_per_node"
_MOST_NODES = 100_000  # the schema's limit
_MOST_GROWTH = 2  # nodes that the layout fills, over those that hold it
_MOST_WORLDS, _MOST_CLUSTERS = 1000, 16  # limits of candidates, to bound a check's time


def found_cluster(spec: RunSpec, machine: Machine) -> Derived:
    """Return the nodes and devices of the allocation or of this machine, as far as both are seen and open."""
    cluster, allocation = spec.cluster, machine.allocation
    chip = CHIPS.get(spec.platform.chip)
    on_gpus = chip is None or chip.device != "cpu"
    elsewhere = spec.launcher.name != "local" and allocation is None
    seen = machine.devices if on_gpus and machine.chip.name == spec.platform.chip and not elsewhere else 0
    found: dict[str, tuple[Any, str]] = {}
    if cluster.nodes == "auto":
        if allocation is not None and allocation.nodes is not None:
            found[_NODES] = (allocation.nodes, f"from the {allocation.source}")
        elif seen:
            found[_NODES] = (1, "this machine")
    if cluster.devices_per_node == "auto" and on_gpus:
        if allocation is not None and allocation.devices_per_node is not None:
            found[_PER_NODE] = (allocation.devices_per_node, f"from the {allocation.source}")
        elif seen:
            found[_PER_NODE] = (seen, "found on this machine")
    return found


def assumed_clusters(spec: RunSpec) -> Iterator[Derived]:
    """Yield candidates for nodes and devices that are still open, the fewest first; at least one.

    On a CPU these are the workers that the layout needs, else whole nodes of the chip. A chip without a usual node
    stays open, and a rule reports it.
    """
    chip, cluster = CHIPS.get(spec.platform.chip), spec.cluster
    per_node = cluster.devices_per_node
    if chip is None or "auto" not in (cluster.nodes, per_node):
        yield {}
    elif chip.device == "cpu":
        yield _workers_of_cpu(spec)
    elif isinstance(per_node, int):
        yield from _whole_nodes(spec, per_node, f"{per_node} devices")
    elif chip.devices_per_node is None:
        yield {}
    else:
        yield from _nodes_of(spec, chip.name, chip.devices_per_node)


def _nodes_of(spec: RunSpec, chip: str, size: int) -> Iterator[Derived]:
    """Yield clusters of the usual node of a chip, or of a part of it."""
    usual = {_PER_NODE: (size, f"assumed: the usual node of {chip}; none is seen here")}
    part = _part_of_a_node(spec, size)
    if isinstance(spec.cluster.nodes, int):
        yield usual
    elif part is not None:
        why = f"assumed: part of a node of {size} {chip}, so that layout and batch divide; none is seen here"
        yield {_NODES: (1, "assumed: it holds the layout"), _PER_NODE: (part, why)}
    else:
        for nodes in _whole_nodes(spec, size, f"{size} {chip}"):
            yield {**nodes, **usual}


def _whole_nodes(spec: RunSpec, per_node: int, devices: str) -> Iterator[Derived]:
    """Yield the fewest nodes that hold the layout and with which the batch divides, then more of them.

    Only the first if the layout does not fill it; the rule parallel.world reports that.
    """
    p = spec.parallel
    fewest = _fewest_nodes(smallest_world(p), per_node) * per_node
    if p.dp is not None:
        worlds = [-(-model_parallel_size(p) * p.dp // per_node) * per_node]
    elif fewest % smallest_world(p):
        worlds = [fewest]
    else:
        worlds = list(islice(_batch_worlds(spec, fewest), _MOST_CLUSTERS)) or [fewest]
    why = f"assumed: the fewest nodes of {devices} that hold the layout"
    for world in worlds:
        yield {_NODES: (min(_MOST_NODES, world // per_node), why)}
        why = f"assumed: the fewest nodes of {devices} in whose memory the run fits"


def _fewest_nodes(ranks: int, per_node: int) -> int:
    """Return the fewest nodes that copies of a layout fill, or those that hold it if it would take many more to fill.

    Two nodes of 8 hold 12 ranks, and 3 are filled by two copies. 3 nodes hold 21 ranks, but only 21 nodes are filled.
    """
    holding = -(-ranks // per_node)
    filled = math.lcm(ranks, per_node) // per_node
    return filled if filled <= _MOST_GROWTH * holding else holding


def _workers_of_cpu(spec: RunSpec) -> Derived:
    """Derive one node, and the workers that the layout needs, with dp within cluster.cpu_workers."""
    cluster, p = spec.cluster, spec.parallel
    derived: dict[str, tuple[Any, str]] = {}
    nodes = cluster.nodes if isinstance(cluster.nodes, int) else 1
    if cluster.nodes == "auto":
        derived[_NODES] = (nodes, "this machine")
    if cluster.devices_per_node != "auto":
        return derived
    if p.dp is None:
        smallest = smallest_world(p)
        workers = smallest * max(1, cluster.cpu_workers // smallest)
        why = f"the largest multiple of the layout's {smallest} ranks within cluster.cpu_workers"
    else:
        workers, why = -(-model_parallel_size(p) * p.dp // nodes), "tp x pp x cp x dp on CPU"
    return {**derived, _PER_NODE: (workers, why)}


def _part_of_a_node(spec: RunSpec, per_node: int) -> int | None:
    """Return the devices of a part of one node, where whole nodes do not divide or exceed a given dp."""
    p = spec.parallel
    smallest = smallest_world(p)
    if p.dp is not None:
        world = model_parallel_size(p) * p.dp
        return world if world < per_node else None
    if smallest >= per_node:
        return None
    whole = _fewest_nodes(smallest, per_node) * per_node
    if whole % smallest == 0 and next(_batch_worlds(spec, whole), None) is not None:
        return None
    parts = range(per_node // smallest * smallest, 0, -smallest)
    return next((world for world in parts if _batch_divides(spec, world)), None)


def _batch_worlds(spec: RunSpec, unit: int) -> Iterator[int]:
    """Yield the multiples of `unit` with which the batch divides."""
    largest = batch_gcd(spec) * model_parallel_size(spec.parallel)  # a sample per data-parallel rank
    worlds = (unit * count for count in range(1, min(_MOST_WORLDS, largest // unit) + 1))
    return (world for world in worlds if _batch_divides(spec, world))


def _batch_divides(spec: RunSpec, world: int) -> bool:
    dp = world // model_parallel_size(spec.parallel)
    return batch_gcd(spec) % (dp * (spec.batch.micro_batch_size or 1)) == 0
