"""A real Ray cluster: a run that has lost a node continues on the other, and takes one that joins; same losses."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest
from cluster_runs import ON_FEWER, assert_losses_on_fewer, processes, started, workers
from launching import events_of, steps_of, wait_until
from training import tiny_overrides

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

pytestmark = [pytest.mark.timed, pytest.mark.slow]

_NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
_PATIENT = ("launcher.hang_timeout=300", "launcher.step_timeout=300")


@pytest.fixture
def cluster():
    """A cluster to which nodes can be added; its head has CPUs for two nodes of a run, but may be only one."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 2, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


@contextmanager
def paused(run):
    """The worker of the run stands still: to start a node of Ray takes longer than the steps that are left."""
    (worker,) = workers(run)
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def saved_on_fewer(run):
    """The number of checkpoints since the run continues on fewer nodes."""
    kinds = [event["event"] for event in read_lines(run.events)]
    return kinds[kinds.index("nodes_changed") :].count("checkpoint") if "nodes_changed" in kinds else 0


def test_a_lost_node_is_left_out_and_another_taken_with_the_losses_of_an_undisturbed_run(
    cluster, tmp_path, tmp_path_factory
):
    run = RunDirectory(tmp_path / "run")
    ray = ("launcher=ray", f"launcher.ray.address={cluster.address}", "cluster.nodes=2", "cluster.devices_per_node=1")
    lost = cluster.add_node(**_NODE)
    with started(tmp_path, *tiny_overrides(tmp_path, *ON_FEWER, *_PATIENT, *ray, "launcher.min_nodes=1")) as train:
        wait_until(lambda: train.poll() is not None or (run.metrics.exists() and len(steps_of(run)) > 6), 180)
        assert train.poll() is None, train.communicate()[0]
        cluster.remove_node(lost, allow_graceful=False)
        wait_until(lambda: train.poll() is not None or saved_on_fewer(run) > 3, 180)
        assert train.poll() is None, train.communicate()[0]
        with paused(run):
            assert events_of(run, "stop_requested") == []  # for the other CPU of the head
            cluster.add_node(**_NODE)
        output, _ = train.communicate(timeout=300)
    assert train.returncode == 0, output
    reason = "the Ray cluster has 1 node, and not 2 with 1 CPU free"
    changes = [(event["nodes"], len(event["hosts"]), event["reason"]) for event in events_of(run, "nodes_changed")]
    assert changes == [(1, 1, reason), (2, 2, "Ray has 1 more node free")], output
    assert [event["workers"] for event in events_of(run, "launch")] == [2, 1, 2]
    assert "the run continues on all 2 nodes: Ray has 1 more node free\n" in output
    assert processes(str(run.root), "-m megalaunch") == []
    assert_losses_on_fewer(run, tmp_path_factory)
