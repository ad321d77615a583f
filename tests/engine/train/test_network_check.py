"""The network is measured before the first step: slow nodes and links are named, and the plan's figure is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_ranks import run_ranks
from looped_run import prepared_directory
from oracle import rank_mesh, small_spec
from slow_cases import slow_but

from megalaunch.engine.train import network_check
from megalaunch.engine.train.network_check import Link, SlowPart, check_network, find_slow
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.plan.cost import constants
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.schema import RunSpec, with_values


def ring(*bandwidths: float) -> list[Link]:
    return [Link((node, (node + 1) % len(bandwidths)), each) for node, each in enumerate(bandwidths)]


@pytest.mark.parametrize(
    ("bandwidths", "sites", "nodes", "links"),
    [
        ((10.0, 6.0, 9.0), 1, None, None),  # above half
        ((2.0, 2.0, 9.0), 1, (1,), ()),
        ((9.0, 2.0, 9.0, 9.0), 1, (), ((1, 2),)),  # a link, but no node
        ((9.0, 3.0, 2.0, 4.0, 9.0), 1, (2, 3), ()),
        ((2.0, 9.0, 4.0, 9.0, 2.0), 1, (0,), ((2, 3),)),
        ((9.0, 1.0, 9.0, 1.0), 2, None, None),  # both between sites, as planned
        ((9.0, 1.0, 2.0, 1.0), 2, (), ((2, 3),)),
    ],
)
def test_a_node_is_slow_if_all_its_links_are(bandwidths, sites, nodes, links):
    slow = find_slow(ring(*bandwidths), sites)
    if nodes is None:
        assert slow is None
    else:
        least = min(each for each in bandwidths if each > 1.0 or sites == 1)
        assert slow == SlowPart(nodes, links, least, max(bandwidths))


def test_the_link_of_two_nodes_is_compared_with_none():
    assert find_slow([Link((0, 1), 1e-9)]) is None
    assert find_slow([Link((0, 1), 1e-9)], sites=2) is None


def several_nodes(nodes: int, per_node: int, **values: object) -> RunSpec:
    spec = small_spec(parallel__dp=nodes * per_node, batch__global_batch_size=2 * nodes * per_node)
    return with_values(spec, {"cluster.nodes": nodes, "cluster.devices_per_node": per_node, **values})


def measured(spec: RunSpec, root: Path, spoil: Callable[[int], None] = lambda rank: None) -> list[dict]:
    """Return the events of a check on forked ranks."""
    world = int(spec.cluster.nodes) * int(spec.cluster.devices_per_node)
    run_ranks(world, _check, spec, root, spoil)
    return [event for event in read_lines(RunDirectory(root).events) if event["event"] == "network"]


def _check(spec: RunSpec, root: Path, spoil: Callable[[int], None]) -> None:
    directory, rank = prepared_directory(spec, root), dist.get_rank()
    record = RunLogger(directory, rank, ProgressWriter(directory.progress(rank), rank, 0))
    network_check.socket.gethostname = lambda: f"n{rank // int(spec.cluster.devices_per_node)}"
    spoil(rank)
    check_network(spec, rank_mesh(spec), record)


def slow_exchanges(ranks: set[int], seconds: float) -> Callable[[int], None]:
    """Let the messages of these ranks, and of their partners, take longer."""

    def spoil(rank: int) -> None:
        best = network_check._best_seconds
        exchange = network_check._time_exchange

        def delayed(mesh, partner, per_node, size):
            members = {rank} if partner is None else {rank, partner * per_node + rank % per_node}
            network_check._best_seconds = lambda *given: best(*given) + seconds * bool(members & ranks)
            return exchange(mesh, partner, per_node, size)

        network_check._time_exchange = delayed

    return spoil


@pytest.mark.parametrize(("nodes", "per_node", "ranks"), slow_but([(3, 1, {1}), (4, 1, {2}), (3, 2, {5})], (3, 1, {1})))
def test_a_node_behind_a_slow_adapter_is_named(tmp_path, nodes, per_node, ranks):
    """Also if only one of its devices is."""
    (event,) = measured(several_nodes(nodes, per_node), tmp_path / "run", slow_exchanges(ranks, 20.0))
    node = max(ranks) // per_node
    assert (event["nodes"], event["slow_nodes"]) == (nodes, [node])
    assert event["slow_places"] == [f"node {node} (n{node})"]
    assert event["slow_bandwidth"] < event["usual_bandwidth"] / 2


def test_two_nodes_are_compared_with_the_plan(tmp_path):
    """Both really communicate: the messages grow until one takes long enough."""
    spec = several_nodes(2, 1)
    (alone,) = measured(spec, tmp_path / "run")
    assert (alone["planned"], alone["slow_nodes"], alone["slow_bandwidth"]) == (None, [], None)
    assert alone["message_bytes"] in {1 << 16 << 2 * step for step in range(5)}
    assert 0.001 < alone["bandwidth"] < 1000
    (given,) = measured(with_values(spec, {"cluster.node_bandwidth": 1.5}), tmp_path / "given")
    assert given["planned"] == pytest.approx(1.5 * constants.NETWORK.value, rel=0.01)


def test_the_bandwidth_is_that_of_the_bytes_that_each_rank_sends_and_receives(tmp_path):
    """2 (n-1)/n of the message, over the slowest rank's time."""

    def spoil(rank: int) -> None:
        network_check._best_seconds = lambda *_: 0.5 if rank == 2 else 0.25

    (event,) = measured(several_nodes(4, 1), tmp_path / "run", spoil)
    assert event["message_bytes"] == 1 << 16
    assert event["bandwidth"] == pytest.approx(2 * 3 / 4 * (1 << 16) / 0.5 / 1e9, rel=0.01)


@pytest.mark.parametrize("values", [{"launcher.preflight": False}, {"cluster.nodes": 1, "cluster.devices_per_node": 2}])
def test_nothing_is_measured_without_the_preflight_and_on_one_node(tmp_path, values):
    def spoil(rank: int) -> None:
        network_check._best_seconds = lambda *_: time.sleep(60)

    assert measured(several_nodes(2, 1, **values), tmp_path / "run", spoil) == []
