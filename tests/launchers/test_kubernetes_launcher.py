"""Jobs of a stand-in for kubectl: what is called, what the cluster's answers mean, and what the user sees of a run."""

from __future__ import annotations

import os
import threading

import pytest
import yaml
from fake_kubectl import FakeKubectl
from launching import wait_until
from slow_cases import slow_but
from training import tiny_overrides
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.launchers.kubernetes.state import job_state
from megalaunch.launchers.launcher import JobStatus
from megalaunch.launchers.record import read_record
from megalaunch.rundir.outcome import Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    fake = FakeKubectl(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return fake


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train(folder, *more):
    pods = ("launcher=kubernetes", "cluster.nodes=2", "launcher.kubernetes.image=me/image:1")
    return call("train", *tiny_overrides(folder, *pods, *more))


def pod(index, phase, created="1", code=None, **status):
    state = {"terminated": {"exitCode": code}} if code is not None else {}
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    told = {"phase": phase, "containerStatuses": [{"name": "node", "state": state}], **status}
    metadata = {"name": f"x-{index}-{created}", "labels": labels, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"nodeName": f"w{index}"}, "status": told}


def conditions(kind, **more):
    return {"status": {"conditions": [{"type": kind, "status": "True", **more}]}}


MAY_HAVE_FEWER = {"spec": {"completions": 2, "successPolicy": {"rules": [{"succeededCount": 1}]}}}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}


@pytest.mark.parametrize(
    ("found", "pods", "status"),
    [
        ({}, [], JobStatus("pending", "PENDING")),
        (
            {},
            [{**pod(0, "Pending", conditions=[UNSCHEDULABLE]), "spec": {}}],
            JobStatus("pending", "PENDING", "Unschedulable: 0/3 nodes: no gpu"),
        ),
        (
            {},
            [pod(0, "Pending", containerStatuses=[{"state": {"waiting": {"reason": "ImagePullBackOff"}}}])],
            JobStatus("pending", "PENDING", "ImagePullBackOff", "w0"),
        ),
        (
            {"status": {"failed": 2}},
            [pod(0, "Running"), pod(1, "Running")],
            JobStatus("running", "RUNNING", "", "w0,w1", 2),
        ),
        ({}, [pod(0, "Running"), pod(1, "Pending")], JobStatus("running", "STARTING", "", "w0,w1")),
        (
            MAY_HAVE_FEWER,
            [pod(0, "Failed", code=137), {**pod(0, "Pending", "2"), "spec": {}}, pod(1, "Running")],
            JobStatus("running", "RUNNING", "1 of 2 pods", "w1"),
        ),
        (MAY_HAVE_FEWER, [pod(0, "Running"), pod(1, "Running")], JobStatus("running", "RUNNING", "", "w0,w1")),
        (
            {**MAY_HAVE_FEWER, **conditions("Failed")},
            [pod(0, "Failed", "1", 137), pod(1, "Failed", "1", 3)],
            JobStatus("ended", "FAILED", "", "w0,w1", exit_code=3),
        ),
        (conditions("Suspended", reason="JobSuspended"), [], JobStatus("pending", "SUSPENDED", "JobSuspended")),
        (conditions("Complete"), [], JobStatus("ended", "COMPLETE", exit_code=0)),
        (conditions("Completed"), [], JobStatus("ended", "COMPLETE", exit_code=0)),
        (
            conditions("Failed", reason="PodFailurePolicy", message="exit code 7"),
            [pod(0, "Failed", "1", 5), pod(0, "Failed", "2", 7), pod(1, "Failed", "3", 5)],
            JobStatus("ended", "FAILED", "PodFailurePolicy: exit code 7", "w0,w1", exit_code=7),
        ),
        (conditions("Failed"), [], JobStatus("ended", "FAILED")),
        ({"status": {"restarts": 1}}, [], JobStatus("running", "STARTING", restarts=1)),
    ],
)
def test_states(found, pods, status):
    assert job_state(found, pods) == status


@pytest.mark.parametrize(
    ("found", "pods", "status"),
    [
        (
            {"status": {"succeeded": 2, "active": 1}},
            [pod(0, "Succeeded", code=0), pod(1, "Running")],
            JobStatus("running", "RUNNING", "2 of 4 tasks complete", "w0,w1"),
        ),
        ({}, [pod(0, "Running")], JobStatus("running", "RUNNING", "0 of 4 tasks complete", "w0")),
        (
            conditions("Failed"),
            [
                pod(0, "Succeeded", code=0),
                pod(1, "Failed", "1", 137),
                pod(1, "Failed", "2", 137),
                pod(2, "Failed", code=3),
            ],
            JobStatus("ended", "FAILED", "", "w0,w1,w2", exit_code=3),
        ),
        (
            conditions("Failed"),
            [pod(0, "Failed", code=1), pod(1, "Failed", "1", 137), pod(1, "Failed", "2", 137)],
            JobStatus("ended", "FAILED", "", "w0,w1", exit_code=137),
        ),
        (conditions("Failed"), [pod(0, "Succeeded", code=0)], JobStatus("ended", "FAILED", "", "w0")),
    ],
)
def test_states_of_tasks(found, pods, status):
    """The failed task: one whose failure a repetition would meet again, else the one that failed most often."""
    assert job_state(found, pods, tasks=4) == status


def test_a_dry_run_prints_what_is_created(cluster, tmp_path):
    done = train(tmp_path, "--dry-run")
    assert done.exit_code == 0, done.output
    assert cluster.calls == []
    assert not (tmp_path / "run").exists()
    _, text = done.stdout.split("\n\n", 1)
    assert train(tmp_path, "--detach").exit_code == 0
    assert RunDirectory(tmp_path / "run").manifest.read_text() == text
    service, job = yaml.safe_load_all(text)
    made = cluster.read(f"job/{job['metadata']['name']}")
    assert made["spec"] == job["spec"]
    owner = cluster.read(f"service/{service['metadata']['name']}")["metadata"]["ownerReferences"]
    assert owner == [{"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": "uid-1"}]


def test_a_job_is_submitted_shown_and_stopped(cluster, tmp_path):
    run = RunDirectory(tmp_path / "run")
    done = train(tmp_path, "--detach", "launcher.kubernetes.namespace=team")
    assert done.exit_code == 0, done.output
    record = read_record(run.job)
    assert record.options == ("--namespace=team", "--context=mini")
    assert f"submitted job {record.id} to kubernetes: 2 nodes, output in run/logs/pod_*.log" in done.stdout
    assert all(words[:2] == ["--namespace=team", "--context=mini"] for words in cluster.calls if "config" not in words)
    verbs = [next(word for word in words if not word.startswith("--")) for words in cluster.calls]
    assert verbs == ["config", "create", "create", "get", "patch"]
    assert "  state    PENDING\n" in call("status", run.root).stdout
    assert "has job" in train(tmp_path).stderr
    name = record.id.partition("/")[2]
    for index in range(2):
        made = pod(index, "Running")
        made["metadata"] = {"name": f"{name}-{index}-a", "labels": {"job-name": name, **made["metadata"]["labels"]}}
        cluster.write(f"pod/{name}-{index}-a", made)
    cluster.log(f"{name}-1-a").write_text("of pod 1\n")
    assert "  state    RUNNING (on w0,w1)\n" in call("status", run.root).stdout
    assert call("logs", run.root).stdout == "of pod 1\n"
    assert call("stop", run.root).stdout == f"job {record.id} is deleted; its pods save a checkpoint and end\n"
    assert "  state    DELETED (not known to Kubernetes any more)\n" in call("status", run.root).stdout
    assert call("logs", run.root).stdout == "of pod 1\n"
    assert train(tmp_path, "--detach").exit_code == 0  # the run continues as the next object
    assert read_record(run.job).id == record.id.removesuffix("1") + "2"
    assert call("stop", run.root, "--now").exit_code == 0
    assert cluster.names("pod") == [f"{name}-0-a", f"{name}-1-a"]  # of the first object


def test_the_end_of_a_job_whose_directory_is_elsewhere_is_read_from_its_pods(cluster, tmp_path):
    run = RunDirectory(tmp_path / "run")

    def fail():
        record = wait_until(lambda: read_record(run.job), 60)
        failed = pod(0, "Failed", code=7)
        failed["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = record.id.partition("/")[2]
        cluster.log("x-0-1").write_text("step 1/20\nnon-finite loss\n")
        cluster.write("pod/x-0-1", failed)
        wait_until(lambda: any("--follow" in words for words in cluster.calls), 60)
        cluster.write(record.id, {**cluster.read(record.id), **conditions("Failed", reason="FailJobSetAction")})

    node_0 = threading.Thread(target=fail)
    node_0.start()
    done = train(tmp_path, "launcher.kubernetes.kind=jobset")
    node_0.join()
    assert done.exit_code == 7, done.output
    assert "\nnon-finite loss\n" in done.stdout
    job = read_record(run.job).id
    assert f"job {job} ended without an outcome of the run: FAILED (FailJobSetAction, on w0)" in done.stderr


def test_an_outcome_of_the_run_is_shown(cluster, tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert train(tmp_path, "--detach").exit_code == 0
    record = read_record(run.job)
    write_outcome(run.outcome, Outcome(0, "finished all 20 steps", 20))
    cluster.write(record.id, {**cluster.read(record.id), **conditions("Complete")})
    watched = call("watch", run.root)
    assert (watched.exit_code, "finished all 20 steps" in watched.stdout) == (0, True)


REFUSED = [
    (
        "create --dry-run=server",
        'error: unable to recognize "x": no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
        "fix:  install its controller in the cluster, or set launcher.kubernetes.kind=job",
    ),
    (
        "create --dry-run=server",
        'error: error validating "x": error validating data: ValidationError(Job.spec): unknown field "completionMode"',
        "fix:  update the cluster: kind=job needs Kubernetes 1.31, or 1.26 with beta features",
    ),
    (
        "create --dry-run=server",
        "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
        "fix:  `kubectl get pods` must work here: choose a cluster by launcher.kubernetes.context",
    ),
    (
        "create",
        "Warning: batch/v1 Job is old\n"
        'Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot create resource "jobs"',
        "fix:  ask for the right to create it, or name another launcher.kubernetes.namespace",
    ),
    (
        "create",
        'Error from server (NotFound): namespaces "team" not found',
        "fix:  create the namespace, or name another in launcher.kubernetes.namespace",
    ),
    (
        "config",
        'error: context "x" does not exist',
        "fix:  `kubectl config get-contexts` lists the values of launcher.kubernetes.context",
    ),
]


@pytest.mark.parametrize(
    ("verb", "message", "told"),
    slow_but(REFUSED, *REFUSED[::3]),
)
def test_what_the_cluster_refuses_is_explained(cluster, tmp_path, verb, message, told):
    cluster.refuse(verb, message)
    done = train(tmp_path)
    assert done.exit_code == 2
    assert "error: kubectl: " in done.stderr
    assert told in done.stderr
    assert "Warning" not in done.stderr
    assert not RunDirectory(tmp_path / "run").job.exists()
    assert "(Forbidden): " not in done.stderr, "the cause without kubectl's own prefix"
    deleted = [words for words in cluster.calls if "delete" in words]
    assert bool(deleted) == (verb == "create")  # nothing of a half-created manifest is left


def test_without_kubectl_the_command_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = train(tmp_path)
    assert done.exit_code == 2
    assert "kubectl is not found on this machine\nfix:  install kubectl" in done.stderr
