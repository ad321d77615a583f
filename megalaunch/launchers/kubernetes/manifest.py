"""Write the manifest of a job: an Indexed Job with its headless service, a JobSet, or a TrainJob; or of tasks, a Job.

All restart pods after failures, but not after an exit code on purpose, which a restart would repeat. A disruption
(preemption, a drained node) and exit code 75 (saved, resumable) restart without counting.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import yaml

from megalaunch.launchers.attached.orders import commands_on_fewer
from megalaunch.launchers.kubernetes.pod import (
    CONTAINER,
    Object,
    command,
    environment,
    escaped,
    pod_settings,
    pod_spec,
    resources,
    volume_mounts,
    working_directory,
)
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema.kubernetes import KubernetesSpec

FINAL_CODES = (
    ExitCode.CONFIGURATION,
    ExitCode.DATA,
    ExitCode.CHECKPOINT,
    ExitCode.NON_FINITE,
    ExitCode.NO_PROGRESS,
)
"""The exit codes of failures on purpose."""
_REPLICATED_JOB = "node"
_LONGEST_NAME = 40  # a pod's host name, with what controllers append, has at most 63
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def object_name(job: Job, submission: int) -> str:
    """Return the name of the object: that of the run, a mark of its directory, and the number of the submission."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    mark = hashlib.sha256(str(job.directory).encode()).hexdigest()[:6]
    plain = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")  # a service's name starts with a letter
    return f"{plain}-{mark}-{submission}"


def manifest_text(job: Job, name: str) -> str:
    """Return the manifest as YAML; the commands on fewer nodes are comments. Raises LauncherError without an image."""
    text: str = yaml.safe_dump_all(manifest(job, name), sort_keys=False, width=1000)
    fewer = "\n# ".join(line.removeprefix("# ") for line in commands_on_fewer(job))
    return f"{text}# {fewer}\n" if fewer else text


def manifest(job: Job, name: str) -> list[Object]:
    """Return the objects to create, the job last. Raises LauncherError without an image."""
    require_image(job.settings.kubernetes)
    settings: KubernetesSpec = job.settings.kubernetes
    kind = settings.kind
    if kind == "job":
        return [_service(job, name), _job(job, name)]
    return [_jobset(job, name) if kind == "jobset" else _trainjob(job, name)]


def task_manifest(job: Job, name: str, tasks: int, attempts: int, module: str) -> Object:
    """Return an Indexed Job with a pod for each of several independent tasks; the first that fails ends it.

    Args:
        attempts: how often a pod of one index is started.
        module: the one that runs in the pods, and takes the arguments of the job.
    """
    limits = {"backoffLimitPerIndex": attempts - 1, "maxFailedIndexes": 0}
    return _indexed_job(job, name, tasks, limits, pod_spec(job, None, module))


def require_image(settings: KubernetesSpec) -> None:
    """Raise LauncherError without an image."""
    if settings.image is None:
        raise LauncherError("launcher.kubernetes.image is not set", "give an image with megalaunch[train]")


def _metadata(settings: KubernetesSpec, name: str) -> Object:
    labels = {"app.kubernetes.io/name": "megalaunch", "app.kubernetes.io/instance": name}
    if settings.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    namespace = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {"name": name, **namespace, "labels": labels}


def _service(job: Job, name: str) -> Object:
    """Return the headless service: pod 0 must be found before it is ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job.settings.kubernetes, name), "spec": spec}


def _job(job: Job, name: str) -> Object:
    limits: Object = {"backoffLimit": job.settings.kubernetes.max_restarts * job.nodes}  # one lost pod may end all
    if job.fewer:  # the pods that are missing at the end of the run never complete
        limits["successPolicy"] = {"rules": [{"succeededCount": 1}]}
    return _indexed_job(job, name, job.nodes, limits, pod_spec(job, name))


def _indexed_job(job: Job, name: str, pods: int, limits: Object, pod: Object) -> Object:
    settings = job.settings.kubernetes
    uncounted: list[Object] = [
        {"action": "Ignore", "onPodConditions": [_DISRUPTED]},
        {"action": "Ignore", "onExitCodes": _codes(ExitCode.PREEMPTED)},
    ]
    spec = {
        **_indexed(pods),
        **limits,
        **_ttl(settings),
        "podFailurePolicy": {"rules": [*uncounted, {"action": "FailJob", "onExitCodes": _codes(*FINAL_CODES)}]},
        "template": {"metadata": {"labels": {"app.kubernetes.io/instance": name}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(settings, name), "spec": spec}


def _indexed(pods: int) -> Object:
    return {"completionMode": "Indexed", "completions": pods, "parallelism": pods}


def _ttl(settings: KubernetesSpec) -> Object:
    return {} if settings.ttl is None else {"ttlSecondsAfterFinished": settings.ttl}


def _codes(*codes: ExitCode) -> Object:
    return {"containerName": CONTAINER, "operator": "In", "values": [int(code) for code in codes]}


def _jobset(job: Job, name: str) -> Object:
    """Return a JobSet: any failed pod fails its one child Job, and all pods start again together."""
    settings = job.settings.kubernetes
    child = {
        **_indexed(job.nodes),
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [_DISRUPTED]},
                {"action": "FailJob", "onExitCodes": _codes(ExitCode.PREEMPTED)},
                {"action": "FailJob", "onExitCodes": _codes(*FINAL_CODES)},
            ]
        },
        "template": {"spec": pod_spec(job, subdomain=None)},
    }
    # The reason of a Job that its policy failed is the same for all rules: its message tells which one it was.
    by_policy = "PodFailurePolicy"
    patterns = ["condition DisruptionTarget", rf"exit code {int(ExitCode.PREEMPTED)}\b"]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "failurePolicy": {
            "maxRestarts": settings.max_restarts,
            "rules": [
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": [by_policy],
                    "onJobFailureMessagePatterns": patterns,
                },
                {"name": "ended", "action": "FailJobSet", "onJobFailureReasons": [by_policy]},
            ],
        },
        **_ttl(settings),
        "replicatedJobs": [{"name": _REPLICATED_JOB, "replicas": 1, "template": {"spec": child}}],
    }
    metadata = _metadata(settings, name)
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _trainjob(job: Job, name: str) -> Object:
    """Return a TrainJob: the trainer's runtime has the pods, their restarts and the variables of the rendezvous.

    A trainer has no working directory, so that `env` of coreutils changes to it.
    """
    settings = job.settings.kubernetes
    own = [variable for variable in environment(job) if variable["name"] != "NNODES"]  # PET_NNODES is the runtime's
    trainer = {
        "image": settings.image,
        "command": escaped(["env", f"--chdir={working_directory(job)}", *command(job)]),
        "env": own,
        "numNodes": job.nodes,
        "numProcPerNode": max(1, job.devices_per_node),
        "resourcesPerNode": resources(job),
    }
    pod: dict[str, Any] = {
        **{key: value for key, value in pod_settings(job).items() if key != "priorityClassName"},
        "containers": [{"name": CONTAINER, "volumeMounts": volume_mounts(settings)}],
    }
    patch = {"template": {"spec": {"replicatedJobs": [_patched(pod)]}}}
    spec = {
        "runtimeRef": {"name": settings.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": "megalaunch.dev/launcher", "trainingRuntimeSpec": patch}],
    }
    metadata = _metadata(settings, name)
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _patched(pod: Object) -> Object:
    return {"name": _REPLICATED_JOB, "template": {"spec": {"template": {"spec": pod}}}}
