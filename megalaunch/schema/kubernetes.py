"""The `launcher.kubernetes` section: what a run asks of a Kubernetes cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec:
    """The object that is created, and its pods: one for each of `cluster.nodes`. null: not given."""

    kind: Literal["job", "jobset", "trainjob"] = setting(
        "job",
        "Object to create: an Indexed Job with a headless service, a JobSet, or a TrainJob of Kubeflow's trainer.",
    )
    image: str | None = setting(None, "Image with megalaunch[train]; required.")
    context: str | None = setting(None, "Context of kubectl; null: the current one.")
    namespace: str | None = setting(None, "Namespace; null: that of the context.")
    service_account: str | None = setting(None, "Service account of the pods; null: the namespace's default.")
    image_pull_secrets: tuple[str, ...] = setting((), "Names of the secrets with which the image is pulled.")
    working_dir: str | None = setting(
        None, "Directory in the pods where the command runs; null: the one where it is typed."
    )
    volumes: tuple[str, ...] = setting(
        (), "Volumes as CLAIM:/PATH[:ro] (a persistent volume claim) or /HOST_PATH:/PATH[:ro]."
    )
    shm: str | None = setting(None, "Size limit of /dev/shm, such as 64Gi; null: no limit but the pod's memory.")
    environment: tuple[str, ...] = setting((), "Variables of the pods as NAME=VALUE; no secrets.")
    secrets: tuple[str, ...] = setting(
        (), "Variables of the pods as NAME=SECRET/KEY: the key of a secret of the namespace, whose value stays there."
    )
    device_resource: str | None = setting(
        None, "Resource of the accelerators; null: nvidia.com/gpu, amd.com/gpu, or that of the platform."
    )
    cpu: str | None = setting(None, "CPUs of each pod, such as '96' or 500m.")
    memory: str | None = setting(None, "Memory of each pod, such as 900Gi.")
    node_selector: tuple[str, ...] = setting((), "Labels that a node must have, as KEY=VALUE.")
    tolerations: tuple[str, ...] = setting(
        (), "Taints that the pods tolerate, as KEY, KEY=VALUE or either with :EFFECT."
    )
    priority_class: str | None = setting(None, "Priority class of the pods.")
    queue: str | None = setting(None, "Local queue of Kueue.")
    runtime: str = setting("torch-distributed", "ClusterTrainingRuntime of a TrainJob.")
    max_restarts: int = setting(
        20,
        "Restarts of the pods after failures, preemption aside; a TrainJob has those of its runtime.",
        minimum=0,
        maximum=10000,
    )
    ttl: int | None = setting(
        604800, "Time from the end of the object until it is deleted; null: never.", "seconds", minimum=0
    )
