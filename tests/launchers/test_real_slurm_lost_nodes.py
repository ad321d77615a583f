"""Real Slurm: a run continues without a lost or slow node, with the losses of an undisturbed run."""

from __future__ import annotations

import sys

import pytest
import torch
from cluster_runs import ON_FEWER, assert_losses_on_fewer, shown, started
from launching import events_of, steps_of, wait_until
from mini_slurm import lose_node, mini_slurm, restarted_node
from training import tiny_overrides

from megalaunch.rundir.paths import RunDirectory

pytestmark = [pytest.mark.timed, pytest.mark.slow]
JOB = ("launcher=slurm", "cluster.nodes=2", "cluster.devices_per_node=1", "launcher.slurm.time='9:00'")


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")  # all nodes are this machine, and n1 is no name of it
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


def overrides_of(folder, *more):
    return tiny_overrides(folder, *ON_FEWER, *JOB, *more, shared=folder.parent)


def test_a_run_continues_without_a_lost_node_and_takes_it_back(environment, tmp_path, tmp_path_factory):
    run = RunDirectory(tmp_path / "run/run")
    overrides = overrides_of(tmp_path / "run", "launcher.min_nodes=1")
    with mini_slurm(tmp_path / "slurm", down_after=300, srun_waits=5) as slurm:
        environment(slurm)
        with started(tmp_path, *overrides) as train:
            wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 6, 120)
            lose_node(slurm, "n2")
            wait_until(lambda: len(events_of(run, "launch")) == 2, 150)
            status = shown("status", run.root)
            with restarted_node(slurm, "n2"):
                output, _ = train.communicate(timeout=300)
        assert train.returncode == 0, output
    assert "  nodes    1 of 2, on n1: n2 does not answer\n" in status
    changes = [(event["nodes"], event["hosts"], event["reason"]) for event in events_of(run, "nodes_changed")]
    assert changes == [(1, ["n1"], "n2 does not answer"), (2, ["n1", "n2"], "n2 is back")], output
    assert [event["workers"] for event in events_of(run, "launch")] == [2, 1, 2]
    assert_losses_on_fewer(run, tmp_path_factory)


def test_a_spare_node_takes_the_place_of_a_lost_one(environment, tmp_path, tmp_path_factory):
    run = RunDirectory(tmp_path / "run/run")
    overrides = overrides_of(tmp_path / "run", "launcher.slurm.spare_nodes=1")
    with mini_slurm(tmp_path / "slurm", nodes=3) as slurm:
        environment(slurm)
        with started(tmp_path, *overrides) as train:
            wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 6, 120)
            lose_node(slurm, "n2")
            output, _ = train.communicate(timeout=300)
        assert train.returncode == 0, output
    assert "the run continues on n1,n3: n2 does not answer\n" in output
    assert [event["workers"] for event in events_of(run, "launch")] == [2, 2]
    assert_losses_on_fewer(run, tmp_path_factory)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the matmuls are not those of MKL, which can be slow")
def test_a_spare_node_takes_the_place_of_one_that_computes_slower(environment, tmp_path, tmp_path_factory):
    run, python = RunDirectory(tmp_path / "run/run"), tmp_path / "python"
    slow = '[ "$SLURMD_NODENAME" != n2 ] || export MKL_CBWR=COMPATIBLE  # matmuls of old processors'
    python.write_text(f'#!/bin/sh\n{slow}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    checks = ("train.straggler_interval=5", "train.straggler_threshold=0.8", "launcher.slurm.replace_stragglers=true")
    overrides = overrides_of(tmp_path / "run", "launcher.slurm.spare_nodes=1", f"launcher.python={python}", *checks)
    with mini_slurm(tmp_path / "slurm", nodes=3) as slurm:
        environment(slurm)
        with started(tmp_path, *overrides) as train:
            output, _ = train.communicate(timeout=300)
        assert train.returncode == 0, output
    (restart,) = events_of(run, "restart")
    assert restart["reason"] == "node 1 (n2) computed slower than the others", output
    assert "the run continues on n1,n3: n2 computed slower than the others\n" in output
    (named, *_) = events_of(run, "straggler")
    assert named["nodes"] == [1]
    assert [event["workers"] for event in events_of(run, "launch")] == [2, 2]
    assert_losses_on_fewer(run, tmp_path_factory)
