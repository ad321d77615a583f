"""Pods as processes: a run that has lost a pod continues in the other with the same losses, and takes a new one."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

import pytest
from cluster_runs import ON_FEWER, assert_losses_on_fewer, call, processes, shown
from fake_kubectl import FakeKubectl
from launching import events_of, steps_of, wait_until
from mini_kubelet import running_pods
from training import tiny_overrides

from megalaunch.launchers.record import read_record
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

pytestmark = [pytest.mark.timed, pytest.mark.slow]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    fake = FakeKubectl(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    return fake


PODS = (
    *("launcher=kubernetes", "launcher.kubernetes.image=none", f"launcher.python={sys.executable}"),
    *("cluster.nodes=2", "cluster.devices_per_node=1", "launcher.min_nodes=1"),
    *ON_FEWER,
)


def holder_of(cluster, kubelet):
    """The index of the pod that holds the run."""
    return next(n for n, pod in kubelet.pods.items() if "holds the run" in cluster.log(pod.name).read_text())


@contextmanager
def running(cluster, folder, run):
    """The run, in two pods that have trained some steps."""
    code, output = call(folder, "train", *tiny_overrides(folder, *PODS), "--detach")
    assert code == 0, output
    with running_pods(cluster, read_record(run.job).id, folder) as kubelet:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 6, 180)
        yield kubelet


@pytest.mark.parametrize("lost", ["the holder of the run", "the other"])
def test_a_lost_pod_is_left_out_and_a_new_one_taken_with_the_losses_of_an_undisturbed_run(
    cluster, tmp_path, tmp_path_factory, lost
):
    run = RunDirectory(tmp_path / "run")
    with running(cluster, tmp_path, run) as kubelet:
        holder = holder_of(cluster, kubelet)
        gone = holder if lost == "the holder of the run" else 1 - holder
        kubelet.pending.add(gone)
        kubelet.kill(gone)
        wait_until(lambda: len(events_of(run, "launch")) == 2, 60)
        status = shown("status", run.root)
        kubelet.pending.clear()
        code, output = call(tmp_path, "watch", str(run.root))
        assert code == 0, output + shown("logs", run.root)
    stays = f"worker-{1 - gone}"
    assert f"  state    RUNNING (1 of 2 pods, on {stays}" in status
    assert f"  nodes    1 of 2, on {stays}: pod {gone} is missing" in status
    changes = [(event["nodes"], event["hosts"], event["reason"]) for event in events_of(run, "nodes_changed")]
    back = f"pod {gone} (on worker-{gone}) is back"
    assert changes == [(1, [stays], f"pod {gone} is missing"), (2, ["worker-0", "worker-1"], back)], output
    assert [event["workers"] for event in events_of(run, "launch")] == [2, 1, 2]
    assert processes(str(run.root), "-m megalaunch") == []
    assert_losses_on_fewer(run, tmp_path_factory)


def test_a_pod_that_was_told_to_end_lets_the_run_save_and_another_takes_its_place(cluster, tmp_path, tmp_path_factory):
    run = RunDirectory(tmp_path / "run")
    with running(cluster, tmp_path, run) as kubelet:
        gone = 1 - holder_of(cluster, kubelet)
        kubelet.pending.add(gone)
        drained = kubelet.pods[gone].process
        drained.terminate()
        assert drained.wait(60) == 75
        wait_until(lambda: len(events_of(run, "launch")) == 2, 60)
        kubelet.pending.clear()
        code, output = call(tmp_path, "watch", str(run.root))
        assert code == 0, output + shown("logs", run.root)
    restarts = [(event["reason"], event["pause_seconds"]) for event in events_of(run, "restart")]
    named = f"pod {gone} (on worker-{gone}) is"
    assert restarts == [(f"{named} told to end", 0.0), (f"{named} back", 0.0)], output
    assert [event["nodes"] for event in events_of(run, "nodes_changed")] == [1, 2]
    assert_losses_on_fewer(run, tmp_path_factory)


def test_stop_lets_all_pods_save_and_end(cluster, tmp_path):
    run = RunDirectory(tmp_path / "run")
    with running(cluster, tmp_path, run) as kubelet:
        with kubelet.paused():  # or the run might end before the command has started
            assert call(tmp_path, "stop", str(run.root))[0] == 0
        wait_until(run.outcome.exists, 60)
        assert [pod.process.wait(60) for pod in kubelet.pods.values()] == [75, 75]
    outcome = read_outcome(run.outcome)
    assert (outcome.exit_code, run.checkpoint(outcome.step).is_dir()) == (75, True)
    assert events_of(run, "restart") == []
    assert processes(str(run.root), "-m megalaunch") == []
