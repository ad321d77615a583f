"""Describe the pods of a job: one container that runs the command of its node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megalaunch.launchers.launcher import Job
from megalaunch.schema.kubernetes import KubernetesSpec

CONTAINER = "node"
PYTHON = "python3"
PROGRAM = "megalaunch"
NODE_VARIABLE = "MEGALAUNCH_NODE_NAME"
"""The name of a pod's node, where pods of a run may be lost."""
_SHARED_MEMORY = "/dev/shm"
_SAVE_SECONDS = 30  # beyond launcher.stop_grace_period, for the launcher to end after its workers

Object = dict[str, Any]


def pod_spec(job: Job, subdomain: str | None, module: str = PROGRAM) -> Object:
    """Return the spec of the pods.

    Args:
        subdomain: the headless service under which pods find each other; None: the controller adds it, or none does.
        module: the one that takes the arguments.
    """
    settings = job.settings.kubernetes
    container: Object = {
        "name": CONTAINER,
        "image": settings.image,
        "command": escaped(command(job, module)),
        "workingDir": working_directory(job),
        "env": environment(job),
        "resources": resources(job),
        "volumeMounts": volume_mounts(settings),
    }
    return {**pod_settings(job), "restartPolicy": "Never", **_given(subdomain=subdomain), "containers": [container]}


def pod_settings(job: Job) -> Object:
    """Return what the spec of a pod has besides its containers."""
    settings = job.settings.kubernetes
    return _given(
        serviceAccountName=settings.service_account,
        imagePullSecrets=[{"name": name} for name in settings.image_pull_secrets] or None,
        nodeSelector=dict(label.split("=", 1) for label in settings.node_selector) or None,
        tolerations=[_toleration(taint) for taint in settings.tolerations] or None,
        priorityClassName=settings.priority_class,
        terminationGracePeriodSeconds=int(job.settings.stop_grace_period) + _SAVE_SECONDS,
        volumes=list(_volumes(settings)),
    )


def command(job: Job, module: str = PROGRAM) -> list[str]:
    """Return the command line of each pod."""
    return [job.settings.python or PYTHON, "-m", module, *job.arguments]


def working_directory(job: Job) -> str:
    """Return the directory in the pods where the command runs."""
    settings: KubernetesSpec = job.settings.kubernetes
    return settings.working_dir or str(job.working_directory)


def escaped(words: Iterable[str]) -> list[str]:
    """Return words in which Kubernetes expands nothing: it reads $(NAME), and $$ as one dollar sign."""
    return [word.replace("$", "$$") for word in words]


def environment(job: Job) -> list[Object]:
    """Return the variables of the pods; a secret is a reference."""
    settings = job.settings.kubernetes
    given = [variable.partition("=")[::2] for variable in settings.environment]
    secret = [variable.partition("=")[::2] for variable in settings.secrets]
    plain = [{"name": name, "value": escaped([value])[0]} for name, value in [("NNODES", str(job.nodes)), *given]]
    node = {"name": NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    return [
        *plain,
        *([node] if job.fewer else []),
        *({"name": name, "valueFrom": {"secretKeyRef": _key(value)}} for name, value in secret),
    ]


def _key(value: str) -> Object:
    name, _, key = value.partition("/")
    return {"name": name, "key": key}


def resources(job: Job) -> Object:
    """Return the resources of each pod; what is requested is also the limit."""
    settings = job.settings.kubernetes
    name = settings.device_resource or job.device_resource
    wanted = _given(cpu=settings.cpu, memory=settings.memory)
    if job.devices_per_node and name:
        wanted[name] = str(job.devices_per_node)
    return {"requests": dict(wanted), "limits": dict(wanted)} if wanted else {}


def _toleration(taint: str) -> Object:
    """Return the toleration of a taint as kubectl writes it: KEY[=VALUE][:EFFECT]."""
    label, _, effect = taint.partition(":")
    key, equals, value = label.partition("=")
    operator = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **operator, **_given(effect=effect or None)}


def volume_mounts(settings: KubernetesSpec) -> list[Object]:
    """Return where the container has its volumes."""
    mounts = []
    for index, volume in enumerate(settings.volumes):
        _, path, *options = volume.split(":")
        mounts.append({"name": f"volume-{index}", "mountPath": path, **({"readOnly": True} if options else {})})
    if _has_shared_memory(settings):
        mounts.append({"name": "shm", "mountPath": _SHARED_MEMORY})
    return mounts


def _volumes(settings: KubernetesSpec) -> Iterable[Object]:
    for index, volume in enumerate(settings.volumes):
        source = volume.partition(":")[0]
        host = source.startswith("/")
        kind = {"hostPath": {"path": source}} if host else {"persistentVolumeClaim": {"claimName": source}}
        yield {"name": f"volume-{index}", **kind}
    if _has_shared_memory(settings):  # a container's own has 64 MiB, too little for NCCL
        yield {"name": "shm", "emptyDir": {"medium": "Memory", **_given(sizeLimit=settings.shm)}}


def _has_shared_memory(settings: KubernetesSpec) -> bool:
    return all(volume.split(":")[1] != _SHARED_MEMORY for volume in settings.volumes)


def _given(**values: Any) -> Object:
    return {name: value for name, value in values.items() if value is not None}
