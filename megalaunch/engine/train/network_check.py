"""Measure the network of a run on several nodes before its first step: an all-reduce, and each link of a ring of nodes.

The all-reduce tells what gradients will have; it is as fast as the slowest link. So each node then exchanges data with
its two neighbours, one after the other: a node whose links are all slow is named. Both take less than a second where
the network is fast, and a few messages of 64 KiB where it is not.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.train.rank_sync import all_gather_numbers, all_gather_objects
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.plan.cost.communication import Interconnect
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec

THRESHOLD = 0.5
"""A link, or the all-reduce, is slow below this share of what the fastest link, or the plan, has."""
_FIRST_BYTES = 1 << 16
_LAST_BYTES = {True: 1 << 28, False: 1 << 24}  # with memory of its own, as a GPU; on a CPU
_GROWTH = 4
_ENOUGH_SECONDS = 0.03  # of one all-reduce: latency no longer counts
_ROUNDS = 2


@dataclass(frozen=True)
class Link:
    """Two neighbouring nodes, and the bytes per second that each device of one sends to its partner on the other."""

    nodes: tuple[int, int]
    bandwidth: float


@dataclass(frozen=True)
class SlowPart:
    """What is slower than the rest.

    Attributes:
        nodes: those whose links are all slow.
        links: other slow links.
        bandwidth: bytes per second of the slowest of them.
        usual: that of the fastest link.
    """

    nodes: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    bandwidth: float
    usual: float


def check_network(spec: RunSpec, mesh: Mesh, record: RunLogger) -> None:
    """Record the event `network` of a run on several nodes, unless `launcher.preflight` is off. Collective."""
    per_node = int(spec.cluster.devices_per_node)
    nodes = mesh.topology.world // per_node
    if nodes < 2 or not spec.launcher.preflight:
        return
    size, seconds = _time_all_reduce(mesh.device)
    links = _time_links(mesh, per_node, size)
    slow = find_slow(links, spec.cluster.sites)
    hosts = [str(host) for host in all_gather_objects(socket.gethostname())][::per_node]
    world = mesh.topology.world
    record.event(
        "network",
        nodes=nodes,
        message_bytes=size,
        bandwidth=_gigabytes(2 * size * (world - 1) / world / seconds),
        planned=_planned_bandwidth(spec, world, size),
        slow_nodes=[] if slow is None else list(slow.nodes),
        slow_places=[] if slow is None else _places(slow, hosts),
        slow_bandwidth=None if slow is None else _gigabytes(slow.bandwidth),
        usual_bandwidth=None if slow is None else _gigabytes(slow.usual),
    )


def find_slow(links: Sequence[Link], sites: int = 1) -> SlowPart | None:
    """Return the nodes and links that are slower than the fastest link; None: there are none, or nothing to compare.

    Args:
        links: a ring of nodes; the one link of two nodes cannot be compared with another.
        sites: links between sites are slow as planned: they are left out.
    """
    per_site = len({node for link in links for node in link.nodes}) // sites
    compared = [link for link in links if sites == 1 or len({node // per_site for node in link.nodes}) == 1]
    if len(compared) < 2:
        return None
    usual = max(link.bandwidth for link in compared)
    slow = [link for link in compared if link.bandwidth < THRESHOLD * usual]
    if not slow:
        return None
    fast = {node for link in compared if link not in slow for node in link.nodes}
    counts = {node: sum(node in link.nodes for link in slow) for link in slow for node in link.nodes}
    named = {node for node, count in counts.items() if node not in fast and count > 1}
    between = tuple(link.nodes for link in slow if not named & {*link.nodes})
    return SlowPart(tuple(sorted(named)), between, min(link.bandwidth for link in slow), usual)


def _time_all_reduce(device: torch.device) -> tuple[int, float]:
    """Return the size of a message that is large enough to measure, and the seconds of its all-reduce."""
    size, last = _FIRST_BYTES, _LAST_BYTES[platform_of(device).has_streams]
    while True:
        values = torch.zeros(size // 4, device=device)
        mine = _best_seconds(device, partial(dist.all_reduce, values))
        (seconds,) = map(max, all_gather_numbers(device, mine))
        if seconds >= _ENOUGH_SECONDS or size >= last:
            return size, seconds
        size *= _GROWTH


def _time_links(mesh: Mesh, per_node: int, size: int) -> list[Link]:
    """Let neighbouring nodes exchange messages, in turns in which every node has at most one partner."""
    world, device = mesh.topology.world, mesh.device
    nodes = world // per_node
    edges = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    turns = [edges[0::2], edges[1::2]]
    if nodes % 2 and nodes > 2:  # the last node of an odd ring meets the first in a turn of their own
        turns = [edges[0:-1:2], edges[1::2], edges[-1:]]
    found = []
    for turn in filter(None, turns):
        partner = {a: b for pair in turn for a, b in (pair, pair[::-1])}.get(mesh.rank // per_node)
        (seconds,) = all_gather_numbers(device, _time_exchange(mesh, partner, per_node, size))
        for pair in turn:
            ranks = [node * per_node + local for node in pair for local in range(per_node)]
            found.append(Link(pair, size / max(seconds[rank] for rank in ranks)))
    return sorted(found, key=lambda link: link.nodes)


def _time_exchange(mesh: Mesh, partner: int | None, per_node: int, size: int) -> float:
    """Return the seconds in which this rank and that of the same place on another node exchange a message."""
    rows = size // 4
    splits = [0] * mesh.topology.world
    if partner is not None:
        splits[partner * per_node + mesh.rank % per_node] = rows
    sent = torch.zeros(sum(splits), device=mesh.device)
    received = torch.empty_like(sent)
    return _best_seconds(mesh.device, lambda: dist.all_to_all_single(received, sent, splits, splits))


def _best_seconds(device: torch.device, communicate: Callable[[], object]) -> float:
    """Return the seconds of the fastest round, after one that opens connections; all ranks begin each together."""
    platform, together = platform_of(device), torch.zeros(1, device=device)
    rounds = []
    for _ in range(_ROUNDS + 1):
        dist.all_reduce(together)
        platform.synchronize(device)
        started = time.perf_counter()
        communicate()
        platform.synchronize(device)
        rounds.append(time.perf_counter() - started)
    return min(rounds[1:])


def _planned_bandwidth(spec: RunSpec, world: int, size: int) -> float | None:
    """Return the bandwidth that the plan counts for this all-reduce, in GB/s; None if it knows no network."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is None or not (spec.cluster.node_bandwidth or chip.network_bandwidth):
        return None
    wires = Interconnect.from_cluster(spec, chip, int(spec.cluster.devices_per_node))
    reduced = wires.ring(size, world, 1)
    return _gigabytes(size * (world - 1) / world / reduced)


def _places(slow: SlowPart, hosts: Sequence[str]) -> list[str]:
    places = [f"node {node} ({hosts[node]})" for node in slow.nodes]
    return places + [f"the link of node {a} ({hosts[a]}) and node {b} ({hosts[b]})" for a, b in slow.links]


def _gigabytes(bandwidth: float) -> float:
    return float(f"{bandwidth / 1e9:.3g}")
