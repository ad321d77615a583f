"""The commands of a manifest run as processes: a run survives its pods, resumes exactly, and leaves nothing.

The manifest is created in a stand-in for kubectl's cluster, and in a real API server where one is built.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from cluster_runs import LENGTH, call, losses_of, shown
from fake_kubectl import FakeKubectl
from launching import steps_of, wait_until
from mini_kubelet import running_pods
from mini_kubernetes import mini_kubernetes
from training import tiny_overrides

from megalaunch.launchers.record import read_record
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

pytestmark = pytest.mark.slow
CANARY = "canary-of-a-token"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    fake = FakeKubectl(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    return fake


def pods(kind):
    return (
        *("launcher=kubernetes", f"launcher.kubernetes.kind={kind}", "launcher.kubernetes.image=none"),
        *("cluster.nodes=2", "cluster.devices_per_node=1", f"launcher.python={sys.executable}"),
        *LENGTH,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    overrides = tiny_overrides(folder, "cluster.devices_per_node=2", *LENGTH)
    assert call(folder, "train", *overrides)[0] == 0
    return losses_of(RunDirectory(folder / "run"))


@pytest.mark.release  # in a real API server, below, a pod of a JobSet is killed too
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_killed_pod_is_replaced_with_the_losses_of_an_undisturbed_run(cluster, tmp_path, undisturbed, kind):
    run = RunDirectory(tmp_path / "run")
    code, output = call(tmp_path, "train", *tiny_overrides(tmp_path, *pods(kind)), "--detach")
    assert code == 0, output
    with running_pods(cluster, read_record(run.job).id, tmp_path) as kubelet:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 24, 180)
        kubelet.kill(1)
        code, output = call(tmp_path, "watch", str(run.root))
        assert code == 0, output + shown("logs", run.root)
        assert len(kubelet.started) >= 4  # node 0 has ended with node 1
    assert "resuming after step " in shown("logs", run.root, "-n", "500")
    assert losses_of(run) == undisturbed


@pytest.mark.release  # as is the stop
def test_stop_lets_the_pods_save_and_the_command_continues(cluster, tmp_path, undisturbed):
    run = RunDirectory(tmp_path / "run")
    overrides = tiny_overrides(tmp_path, *pods("job"))
    assert call(tmp_path, "train", *overrides, "--detach")[0] == 0
    with running_pods(cluster, read_record(run.job).id, tmp_path) as kubelet:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 4, 180)
        with kubelet.paused():  # or the run might end before the command has started
            assert call(tmp_path, "stop", str(run.root))[0] == 0
        wait_until(run.outcome.exists, 60)
    outcome = read_outcome(run.outcome)
    assert (outcome.exit_code, run.checkpoint(outcome.step).is_dir()) == (75, True)
    assert call(tmp_path, "train", *overrides, "--detach")[0] == 0
    with running_pods(cluster, read_record(run.job).id, tmp_path):
        assert call(tmp_path, "watch", str(run.root))[0] == 0
    assert losses_of(run) == undisturbed


@pytest.fixture
def kubernetes(tmp_path_factory, monkeypatch):
    with mini_kubernetes(tmp_path_factory.mktemp("kubernetes")) as real:
        for name, value in real.variables.items():
            monkeypatch.setenv(name, value)
        yield real


def test_a_jobset_of_a_real_api_server_is_shown_stopped_and_resumed_exactly(
    kubernetes, tmp_path, undisturbed, monkeypatch
):
    """Stopped once, then a killed pod: the losses of an undisturbed run, and the token in its secret alone."""
    run = RunDirectory(tmp_path / "run")
    kubernetes.create("secret", {"metadata": {"name": "hub"}, "stringData": {"token": CANARY}})
    overrides = tiny_overrides(tmp_path, *pods("jobset"), "launcher.kubernetes.secrets=['HF_TOKEN=hub/token']")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as here:
        here.setenv("HF_TOKEN", CANARY)
        shown("train", *overrides, "--detach")
    job = read_record(run.job).id
    assert kubernetes.read(job)["spec"] == yaml.safe_load(run.manifest.read_text())["spec"]
    with running_pods(kubernetes, job, tmp_path) as kubelet:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 4, 180)
        assert "  state    RUNNING (on worker-0,worker-1)" in shown("status", run.root)
        assert job in shown("list", tmp_path)
        assert "step " in shown("logs", run.root)
        kept = json.dumps([kubernetes.items(kind) for kind in ("jobset", "pod", "event")])
        environment = Path(f"/proc/{kubelet.pods[0].process.pid}/environ").read_bytes()
        with kubelet.paused():
            assert shown("stop", run.root) == f"job {job} is deleted; its pods save a checkpoint and end\n"
        wait_until(run.outcome.exists, 60)
        wait_until(lambda: kubernetes.items("pod") == [], 60)
    assert " (exit code 75 by outcome.json; not known to Kubernetes any more)\n" in shown("status", run.root)
    outcome = read_outcome(run.outcome)
    assert (outcome.exit_code, run.checkpoint(outcome.step).is_dir()) == (75, True)
    assert f"HF_TOKEN={CANARY}".encode() in environment
    assert "secretKeyRef" in kept
    assert CANARY not in kept + run.manifest.read_text()
    shown("train", *overrides, "--detach")
    with running_pods(kubernetes, read_record(run.job).id, tmp_path) as kubelet:
        wait_until(lambda: len(steps_of(run)) > outcome.step + 24, 180)
        kubelet.kill(1)
        code, output = call(tmp_path, "watch", str(run.root))
        assert code == 0, output + shown("logs", run.root)
        assert len(kubelet.started) >= 4  # node 0 has ended with node 1
    assert "  state    COMPLETE (on worker-0,worker-1, restart 1)" in shown("status", run.root)
    assert losses_of(run) == undisturbed
