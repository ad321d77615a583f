"""Manifests: valid by the schemas of Kubernetes, JobSet and Kubeflow's trainer, and exact in what they hold."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kubernetes_jobs import FULL, job_of
from mini_kubelet import _expanded

from megalaunch.launchers.kubernetes import detached_pod, pod_task
from megalaunch.launchers.kubernetes.manifest import manifest, manifest_text, object_name
from megalaunch.launchers.kubernetes.tasks import DetachedKubernetesTasks, KubernetesTasks
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.launchers.tasks import TaskSet


def pod_template(job: Job) -> dict:
    last = manifest(job, "llama-1")[-1]
    spec = last["spec"] if last["kind"] == "Job" else last["spec"]["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"]


def test_the_pods_of_a_full_job():
    pod = pod_template(job_of(**FULL, priority_class="high"))
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == "trainer"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["nodeSelector"] == {"gpu": "h100", "example.com/zone": "a"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "llm"},
        {"key": "any", "operator": "Exists"},
    ]
    assert (pod["priorityClassName"], pod["restartPolicy"], pod["subdomain"]) == ("high", "Never", "llama-1")
    assert pod["volumes"] == [
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "volume-1", "hostPath": {"path": "/mnt/local"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
    ]
    assert container["volumeMounts"] == [
        {"name": "volume-0", "mountPath": "/work"},
        {"name": "volume-1", "mountPath": "/scratch", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    wanted = {"cpu": "96", "memory": "900Gi", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    assert container["command"] == ["python3", "-m", "megalaunch", "train", "recipe=tiny"]
    assert container["workingDir"] == "/work"
    assert container["env"] == [
        {"name": "NNODES", "value": "2"},
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "GREETING", "value": "$$(NNODES) $$$$ $$HOME"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}},
    ]


def test_a_job_restarts_what_a_restart_can_help():
    service, job = manifest(job_of(max_restarts=3), "llama-1")
    assert service["spec"]["selector"] == {"job-name": "llama-1"}
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 6  # both pods end when one is lost
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert [rule["onExitCodes"]["values"] for rule in rules[1:]] == [[75], [2, 3, 4, 7, 8]]


def test_a_job_that_may_have_fewer_pods_completes_with_one_and_shows_the_commands_for_them():
    job = replace(job_of(), fewer={1: ("train", "recipe=tiny", "cluster.nodes=1")})
    _, made = manifest(job, "llama-1")
    assert made["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    (container,) = made["spec"]["template"]["spec"]["containers"]
    field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert container["env"][-1] == {"name": "MEGALAUNCH_NODE_NAME", "valueFrom": field}
    text = manifest_text(job, "llama-1")
    assert text.endswith("\n# on 1 node, after others were lost\n# megalaunch train recipe=tiny cluster.nodes=1\n")
    assert list(yaml.safe_load_all(text)) == manifest(job, "llama-1")


@pytest.mark.parametrize(
    ("message", "action"),
    [
        ("Container node for pod d/x failed with exit code 75 matching FailJob rule at index 1", "restart"),
        ("Pod d/x has condition DisruptionTarget matching FailJob rule at index 0", "restart"),
        ("Container node for pod d/x failed with exit code 7 matching FailJob rule at index 2", "fail"),
        ("Container node for pod d/x failed with exit code 3 matching FailJob rule at index 2", "fail"),
    ],
)
def test_a_jobset_tells_preemption_from_failure_by_the_message_of_its_job(message, action):
    (jobset,) = manifest(job_of(kind="jobset"), "llama-1")
    preempted, ended = jobset["spec"]["failurePolicy"]["rules"]
    assert (preempted["action"], ended["action"]) == ("RestartJobSetAndIgnoreMaxRestarts", "FailJobSet")
    matches = any(re.search(pattern, message) for pattern in preempted["onJobFailureMessagePatterns"])
    assert matches == (action == "restart")
    assert jobset["spec"]["network"]["subdomain"] == "llama-1"
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_manifest_says_everything_where_it_stands(kind):
    """Anchors of YAML (&id001) are right for kubectl, and a riddle for people."""
    text = manifest_text(job_of(**{**FULL, "kind": kind}), "llama-1")
    assert "kind: " in text
    assert not re.search(r"[&*]id\d+", text)


def test_a_trainjob_leaves_the_rendezvous_to_its_runtime():
    (trainjob,) = manifest(job_of(**{**FULL, "kind": "trainjob"}), "llama-1")
    trainer = trainjob["spec"]["trainer"]
    assert trainer["command"][:5] == ["env", "--chdir=/work", "python3", "-m", "megalaunch"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert [variable["name"] for variable in trainer["env"]] == ["NCCL_DEBUG", "GREETING", "HF_TOKEN"]
    assert trainjob["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


def tasks_of(numbers=(0, 2, 5), **kubernetes):
    settings = job_of(**kubernetes).settings
    where, words = (Path("/data/out_job"), Path("/data")), ("TASK_NUMBER", "it's $HOME.jsonl")
    return TaskSet(
        "shards",
        ("preprocess", "--shard"),
        words,
        numbers,
        ("preprocess", "a b"),
        *where,
        settings,
        8,
        "nvidia.com/gpu",
    )


def test_tasks_are_pods_of_an_indexed_job():
    text = KubernetesTasks().manifest(tasks_of(**{**FULL, "kind": "jobset"}))
    assert text.endswith("# here, after all tasks\n# megalaunch preprocess 'a b'\n")
    (job,) = yaml.safe_load_all(text)
    spec, training = job["spec"], manifest(job_of(**FULL), "llama-1")[-1]["spec"]
    assert (job["kind"], spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Job", "Indexed", 3, 3)
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], "backoffLimit" in spec) == (1, 0, False)
    pods, others = spec["template"]["spec"], training["template"]["spec"]
    assert "subdomain" not in pods
    for key in ("volumes", "tolerations", "serviceAccountName", "restartPolicy", "terminationGracePeriodSeconds"):
        assert pods[key] == others[key]
    assert spec["podFailurePolicy"] == training["podFailurePolicy"]
    (container,), (other,) = pods["containers"], others["containers"]
    for key in ("image", "workingDir", "volumeMounts", "resources"):
        assert container[key] == other[key]
    assert container["env"] == [{"name": "NNODES", "value": "1"}, *other["env"][1:]]
    pytest.importorskip("kubernetes_validate").validate(job, "1.34", strict=True)


@pytest.mark.parametrize(("index", "number"), [(0, "0"), (1, "2"), (2, "5")])
def test_the_index_of_a_pod_is_the_number_of_its_task(monkeypatch, index, number):
    (job,) = yaml.safe_load_all(KubernetesTasks().manifest(tasks_of()))
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["python3", "-m", pod_task.MODULE]
    became = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    pod_task.main([_expanded(word, {}) for word in command[3:]])
    own = ["preprocess", "--shard", number, "TASK_NUMBER", "it's $HOME.jsonl"]
    assert became == [[sys.executable, "-m", "megalaunch", *own]]
    assert "JOB_COMPLETION_INDEX" not in os.environ  # it would be the rank of a node


def run_detached_pod(monkeypatch, tasks, index, code=0):
    """Run what the pod of an index runs; its task, and the final command if it became that."""
    ran, became = [], []
    (job,) = yaml.safe_load_all(DetachedKubernetesTasks().manifest(tasks))
    words = [_expanded(word, {}) for word in job["spec"]["template"]["spec"]["containers"][0]["command"]]
    assert words[:3] == ["python3", "-m", detached_pod.MODULE]
    monkeypatch.setattr(detached_pod, "_run", lambda words: ran.append(words) or code)
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words[3:]))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    try:
        detached_pod.main(words[3:])
    finally:
        monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    return ran, became


def detached_tasks(folder, numbers=(0, 2, 5)):
    tasks = replace(tasks_of(numbers), directory=folder)
    (job,) = yaml.safe_load_all(DetachedKubernetesTasks().manifest(tasks))
    (folder / "logs" / f"{job['metadata']['name']}.places").mkdir(parents=True)
    return tasks, job


def test_the_last_detached_pod_runs_the_final_command(monkeypatch, tmp_path):
    tasks, job = detached_tasks(tmp_path)
    pytest.importorskip("kubernetes_validate").validate(job, "1.34", strict=True)
    assert job["spec"]["completions"] == 3

    def own(number):
        return [["preprocess", "--shard", number, "TASK_NUMBER", "it's $HOME.jsonl"]]

    assert run_detached_pod(monkeypatch, tasks, 2) == (own("5"), [])
    assert run_detached_pod(monkeypatch, tasks, 0) == (own("0"), [])
    assert run_detached_pod(monkeypatch, tasks, 2) == (own("5"), [])  # started again, it has its place already
    assert run_detached_pod(monkeypatch, tasks, 1) == (own("2"), [["preprocess", "a b"]])
    assert run_detached_pod(monkeypatch, tasks, 1) == (own("2"), [["preprocess", "a b"]])  # killed in the final command
    assert run_detached_pod(monkeypatch, tasks, 0) == (own("0"), [])


@pytest.mark.parametrize(("code", "shown"), [(3, 3), (-9, 137)])
def test_a_detached_pod_whose_task_has_failed_takes_no_place(monkeypatch, tmp_path, code, shown):
    tasks, _ = detached_tasks(tmp_path, (4,))
    with pytest.raises(SystemExit) as ended:
        run_detached_pod(monkeypatch, tasks, 0, code)
    assert ended.value.code == shown
    assert run_detached_pod(monkeypatch, tasks, 0)[1] == [["preprocess", "a b"]]


def test_without_tasks_the_only_detached_pod_runs_the_final_command(monkeypatch, tmp_path):
    tasks, job = detached_tasks(tmp_path, ())
    assert job["spec"]["completions"] == 1
    assert run_detached_pod(monkeypatch, tasks, 0) == ([], [["preprocess", "a b"]])


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("settings", [{}, FULL], ids=["plain", "full"])
def test_schemas_accept_the_manifest(kind, settings):
    """The schemas of a release of Kubernetes, and the models of the controllers; an unknown field is an error too."""
    validate = pytest.importorskip("kubernetes_validate")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = job_of(**{**settings, "kind": kind})
    if kind == "job":
        job = replace(job, fewer={1: ("train",)})
    for found in yaml.safe_load_all(manifest_text(job, "llama-1")):
        if found["kind"] in ("Service", "Job"):
            validate.validate(found, "1.34", strict=True)
            continue
        name = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}[found["kind"]]
        assert getattr(models, name).from_dict(found).to_dict() == found


def test_an_unknown_field_is_found():
    validate = pytest.importorskip("kubernetes_validate")
    _, job = manifest(job_of(), "llama-1")
    job["spec"]["completionmode"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.34", strict=True)


TRICKY = (
    "a b",
    "it's",
    '"',
    "$(NNODES)",
    "$$",
    "$",
    "`id`",
    "ä: #",
    "{{x}}",
    "null",
    "",
    "line\nbreak",
    "- x",
    "*a",
    "&a",
)


@pytest.mark.parametrize("value", TRICKY)
@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_values_reach_the_command_as_they_are(value, kind):
    job = job_of(("train", f"run.name={value}"), kind=kind)
    last = list(yaml.safe_load_all(manifest_text(job, "llama-1")))[-1]
    command = pod_template(job)["containers"][0]["command"] if kind == "job" else last["spec"]["trainer"]["command"]
    assert _expanded(command[-1], {"NNODES": "2"}) == f"run.name={value}"


@pytest.mark.parametrize(
    ("name", "start"), [("Ab_c.1", "ab-c-1"), ("x" * 90, "x" * 40), ("8b", "run-8b"), ("___", "run"), ("ä", "run")]
)
def test_names_are_those_of_a_service(name, start):
    made = object_name(replace(job_of(), name=name), 3)
    assert re.fullmatch(rf"{start}-[0-9a-f]{{6}}-3", made)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,54}[a-z0-9])?", made)  # 63 with a pod's `-node-0-99`
    assert object_name(replace(job_of(), directory=Path("/b")), 3) != object_name(job_of(), 3)


def test_an_image_is_needed():
    with pytest.raises(LauncherError, match=r"launcher\.kubernetes\.image is not set"):
        manifest(job_of(image=None), "llama-1")


def test_a_mounted_shared_memory_is_not_mounted_twice():
    pod = pod_template(job_of(volumes=("/ram:/dev/shm",)))
    assert [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]] == ["/dev/shm"]
    assert "emptyDir" not in pod["volumes"][0]


def test_no_secret_value_is_in_a_manifest(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    for kind in ("job", "jobset", "trainjob"):
        text = manifest_text(job_of(**{**FULL, "kind": kind}), "llama-1")
        assert "canary" not in text
        assert "secretKeyRef" in text
