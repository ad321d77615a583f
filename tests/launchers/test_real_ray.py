"""A real Ray cluster of two nodes on this machine: a run survives its agents, resumes exactly, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from cluster_runs import (
    LENGTH,
    STEPS,
    agents,
    detached_and_stopped,
    losses_of,
    processes,
    started,
    undisturbed_run,
    workers,
)
from launching import steps_of, wait_until
from training import tiny_overrides
from typer.testing import CliRunner
from warm_process import COLD_MEGALAUNCH

from megalaunch.cli.app import app
from megalaunch.launchers.record import read_record
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

_RAY = ("launcher=ray", "cluster.nodes=2", "cluster.devices_per_node=1")


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster whose two nodes are processes of this machine."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        made.add_node(**size)
        yield made.address
    finally:
        made.shutdown()


@pytest.mark.slow
@pytest.mark.timed
def test_a_killed_agent_is_started_again_with_the_losses_of_an_undisturbed_run(cluster, tmp_path, tmp_path_factory):
    run = RunDirectory(tmp_path / "run")
    overrides = tiny_overrides(tmp_path, *_RAY, f"launcher.ray.address={cluster}", *LENGTH)
    with started(tmp_path, *overrides) as train:
        wait_until(lambda: train.poll() is not None or (run.metrics.exists() and len(steps_of(run)) > 12), 180)
        assert train.poll() is None, train.communicate()[0]
        (agent,) = agents(run, "--node-rank=1")
        os.kill(agent, signal.SIGKILL)
        output, _ = train.communicate(timeout=240)
        assert train.returncode == 0, output
    assert "restart 1: node 1 (" in output
    assert "resuming after step " in output
    assert processes(str(run.root), "-m megalaunch") == []
    assert len(losses_of(run)) == STEPS
    assert losses_of(run) == losses_of(undisturbed_run(tmp_path_factory))


@pytest.fixture
def no_cluster(monkeypatch):
    """No cluster that a null address finds; the folder of the one that a command starts, short as its sockets need."""
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield folder


@pytest.mark.slow
@pytest.mark.timed
def test_without_an_address_ray_is_started_here_and_a_killed_agent_resumes_exactly(
    no_cluster, tmp_path, tmp_path_factory
):
    run = RunDirectory(tmp_path / "run")
    here = ("launcher=ray", "cluster.devices_per_node=2", *LENGTH)
    with started(tmp_path, *tiny_overrides(tmp_path, *here)) as train:
        wait_until(lambda: train.poll() is not None or (run.metrics.exists() and len(steps_of(run)) > 12), 180)
        assert train.poll() is None, train.communicate()[0]
        assert processes(no_cluster, "raylet") != []
        (agent,) = agents(run)
        os.kill(agent, signal.SIGKILL)
        output, _ = train.communicate(timeout=240)
        assert train.returncode == 0, output
    assert "restart 1: " in output
    assert "resuming after step " in output
    assert processes(str(run.root), "-m megalaunch") == []
    wait_until(lambda: processes(no_cluster, "raylet") == [], 30)
    assert len(losses_of(run)) == STEPS
    assert losses_of(run) == losses_of(undisturbed_run(tmp_path_factory))


@pytest.mark.slow
@pytest.mark.timed
def test_a_stop_saves_and_a_killed_launcher_leaves_nothing(cluster, tmp_path):
    run = RunDirectory(tmp_path / "run")
    overrides = tiny_overrides(tmp_path, *_RAY, f"launcher.ray.address={cluster}", "train.steps=2000")
    with started(tmp_path, *overrides) as train:
        wait_until(lambda: train.poll() is not None or (run.metrics.exists() and len(steps_of(run)) > 2), 180)
        train.send_signal(signal.SIGTERM)
        output, _ = train.communicate(timeout=120)
        assert train.returncode == 75, output
    outcome = read_outcome(run.outcome)
    assert run.checkpoint(outcome.step).is_dir()
    with started(tmp_path, *overrides) as train:
        wait_until(lambda: train.poll() is not None or len(workers(run)) == 2, 180)
        assert train.poll() is None, train.communicate()[0]
        train.kill()
        wait_until(lambda: processes(str(run.root), "-m megalaunch") == [], 30)


@pytest.mark.slow
@pytest.mark.timed
def test_a_detached_run_continues_in_the_background_until_it_is_stopped(cluster, tmp_path):
    run = RunDirectory(tmp_path / "run")
    overrides = tiny_overrides(tmp_path, *_RAY, f"launcher.ray.address={cluster}", "train.steps=3000")
    output = detached_and_stopped(tmp_path, run, *overrides)
    assert f"submitted job {read_record(run.job).id} to ray: 2 nodes" in output
    assert processes(str(run.root), "-m megalaunch") == []


@pytest.mark.slow
@pytest.mark.timed
def test_what_the_cluster_has_not_is_named(cluster, tmp_path):
    more = ("cluster.nodes=3", "batch.global_batch_size=6", "launcher.ray.placement_timeout=2")
    overrides = tiny_overrides(tmp_path, *_RAY, f"launcher.ray.address={cluster}", *more)
    done = subprocess.run([*COLD_MEGALAUNCH, "train", *overrides], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert (
        "the Ray cluster has 2 nodes, and not 3 with 1 CPU free\nfix:  `ray status` shows what is used" in done.stderr
    )
    assert not RunDirectory(tmp_path / "run").job.exists()


def test_a_dry_run_prints_the_placement_group_and_the_orders(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY_TOKEN", "canary-of-a-token")
    more = ("launcher.ray.environment=[CANARY_*]", "--dry-run")
    done = CliRunner().invoke(app, ["train", *tiny_overrides(tmp_path, *_RAY, *more)])
    assert done.exit_code == 0, done.output
    group, node_0, order, node_1, _ = done.stdout.split("\n\n", 1)[1].splitlines()
    assert group == '# placement group: STRICT_SPREAD, 2 x {"CPU": 1.0}'
    assert (node_0, node_1) == ("# node 0", "# node 1")
    assert json.loads(order)["environment"]["CANARY_TOKEN"] == "<value of CANARY_TOKEN>"
    assert "canary-of-a-token" not in done.output


def test_a_cluster_that_does_not_start_here_is_an_error_with_its_log(tmp_path, monkeypatch):
    """On a busy machine Ray's own time limits end it, with an exception of no class of its own."""

    def init(**settings):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = CliRunner().invoke(app, ["train", *tiny_overrides(tmp_path, *_RAY)])
    assert done.exit_code == 2
    assert "error: Ray does not start on this machine: The current node timed out during startup.\n" in done.stderr
    assert "fix:  see raylet.err in /scratch/ray/session_latest/logs; a busy machine" in done.stderr
    assert not RunDirectory(tmp_path / "run").job.exists()


@pytest.mark.slow
def test_an_address_without_a_cluster_is_named(tmp_path):
    if find_spec("ray") is None:  # imported here, it would end the forked starts of this process (warm_process)
        pytest.skip("ray (the extra `parity`) is not installed")
    overrides = tiny_overrides(tmp_path, *_RAY, "launcher.ray.address='no port'")
    done = subprocess.run([*COLD_MEGALAUNCH, "train", *overrides], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error: Ray does not connect to no port: " in done.stderr
