"""The commands of a manifest run as processes: a run survives its pods, resumes exactly, and leaves nothing."""

from __future__ import annotations

import os
import sys

import pytest
from cluster_runs import LENGTH, call, losses_of
from fake_kubectl import FakeKubectl
from launching import steps_of, wait_until
from mini_kubelet import running_pods
from slow_cases import slow_but
from training import tiny_overrides

from megalaunch.launchers.record import read_record
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("kind", slow_but(["job", "jobset"], every=["jobset"]))
def test_a_killed_pod_is_replaced_with_the_losses_of_an_undisturbed_run(cluster, tmp_path, undisturbed, kind):
    run = RunDirectory(tmp_path / "run")
    code, output = call(tmp_path, "train", *tiny_overrides(tmp_path, *pods(kind)), "--detach")
    assert code == 0, output
    with running_pods(cluster, read_record(run.job).id, tmp_path) as kubelet:
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 24, 180)
        kubelet.kill(1)
        code, output = call(tmp_path, "watch", str(run.root))
        assert code == 0, output + call(tmp_path, "logs", str(run.root))[1]
        assert len(kubelet.started) >= 4  # node 0 has ended with node 1
    assert "resuming after step " in call(tmp_path, "logs", str(run.root), "-n", "500")[1]
    assert losses_of(run) == undisturbed


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
