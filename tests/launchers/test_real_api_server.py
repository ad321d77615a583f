"""What a real Kubernetes API server accepts and refuses of our manifests, and what the user reads of it.

The server is 1.20, the newest whose code a package has. It knows Job without the fields of Indexed Jobs that came later
(`completionMode`, `podFailurePolicy`): the schemas of `test_kubernetes_manifest` check those. Of TrainJob it has the
models that Kubeflow publishes; it evaluates no rules in CEL, which `test_kubernetes_cel_rules` states.
"""

from __future__ import annotations

import pytest
import yaml
from kubernetes_jobs import FULL, job_of
from launching import wait_until
from mini_kubernetes import FORBIDDEN, mini_kubernetes
from training import tiny_overrides
from trainjob_crd import trainjob_definition
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.launchers.kubernetes.kubectl import check_manifest
from megalaunch.launchers.kubernetes.manifest import manifest
from megalaunch.launchers.launcher import LauncherError
from megalaunch.rundir.paths import RunDirectory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory):
    with mini_kubernetes(tmp_path_factory.mktemp("kubernetes")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster, monkeypatch):
    for name, value in shared_cluster.variables.items():
        monkeypatch.setenv(name, value)
    return shared_cluster


def check(folder, *objects):
    """Let the server check objects."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    check_manifest([], path)


def train(folder, *more):
    pods = ("launcher=kubernetes", "cluster.nodes=2", "launcher.kubernetes.image=me/image:1", "--detach")
    return CliRunner().invoke(app, ["train", *tiny_overrides(folder, *pods, *more)])


def test_every_setting_of_a_jobset_is_accepted_and_nothing_is_created(cluster, tmp_path):
    for settings in ({}, {**FULL, "namespace": "default", "priority_class": "high"}):
        check(tmp_path, *manifest(job_of(**settings, kind="jobset"), "llama-1"))
    assert cluster.items("jobset") == []


def test_what_this_server_knows_of_an_indexed_job_is_accepted(cluster, tmp_path):
    service, job = manifest(job_of(**{**FULL, "namespace": "default"}), "llama-1")
    for name in ("completionMode", "podFailurePolicy"):
        del job["spec"][name]
    check(tmp_path, service, job)
    job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][1]["mountPath"] = "/work"
    with pytest.raises(LauncherError, match=r"volumeMounts\[1\]\.mountPath: Invalid value: .*must be unique"):
        check(tmp_path, service, job)


REFUSED = {
    "an old server": (
        ["launcher.kubernetes.kind=job"],
        'unknown field "completionMode"',
        "fix:  update the cluster: kind=job needs Kubernetes 1.31, or 1.26 with beta features",
    ),
    "no controller": (
        ["launcher.kubernetes.kind=trainjob"],
        'no matches for kind "TrainJob" in version "trainer.kubeflow.org/v1alpha1"',
        "fix:  install its controller in the cluster, or set launcher.kubernetes.kind=job",
    ),
    "a wrong value": (
        [f"launcher.kubernetes.queue={'a' * 64}"],
        'is invalid: metadata.labels: Invalid value: "aaaaa',
        "fix:  change the setting of launcher.kubernetes that it names: --dry-run prints the manifest",
    ),
    "no right": (
        [f"launcher.kubernetes.context={FORBIDDEN}"],
        f'jobsets.jobset.x-k8s.io is forbidden: User "{FORBIDDEN}" cannot create resource',
        "fix:  ask for the right to create it, or name another launcher.kubernetes.namespace",
    ),
    "no namespace": (
        ["launcher.kubernetes.namespace=nowhere"],
        'namespaces "nowhere" not found',
        "fix:  create the namespace, or name another in launcher.kubernetes.namespace",
    ),
    "no context": (
        ["launcher.kubernetes.context=nowhere"],
        'context "nowhere" does not exist',
        "fix:  `kubectl config get-contexts` lists the values of launcher.kubernetes.context",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_server_refuses_is_explained(cluster, tmp_path, case):
    overrides, message, fix = REFUSED[case]
    run = RunDirectory(tmp_path / "run")
    done = train(tmp_path, "launcher.kubernetes.kind=jobset", *overrides)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Warning" not in done.stderr
    assert fix in done.stderr
    assert not run.job.exists()
    assert cluster.items("jobset") == []


@pytest.fixture
def trainjobs(cluster):
    """The kind TrainJob, as Kubeflow publishes it, for as long as a test lasts: another needs a server without it."""
    definition = trainjob_definition(pytest.importorskip("kubeflow_trainer_api.models"))
    cluster.create("definition", definition)
    wait_until(lambda: any(name.endswith(".v1alpha1.TrainJob") for name in cluster.schemas()), 60)  # what kubectl reads
    yield
    cluster.remove(f"definition/{definition['metadata']['name']}")


def test_every_setting_of_a_trainjob_is_accepted_and_others_are_not(cluster, trainjobs, tmp_path):
    for settings in ({}, {**FULL, "namespace": "default"}):
        (job,) = manifest(job_of(**settings, kind="trainjob"), "llama-1")
        check(tmp_path, job)
    trainer = job["spec"]["trainer"]
    trainer["numNodes"] = "two"
    with pytest.raises(LauncherError, match="numNodes"):
        check(tmp_path, job)
    del trainer["numNodes"]
    trainer["nodes"] = 2
    with pytest.raises(LauncherError, match='unknown field "nodes"'):
        check(tmp_path, job)
    del trainer["nodes"], job["spec"]["runtimeRef"]
    with pytest.raises(LauncherError, match="runtimeRef"):
        check(tmp_path, job)
