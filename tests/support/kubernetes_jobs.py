"""A job of Kubernetes for tests of its manifest: with the least settings, or with all."""

from __future__ import annotations

from pathlib import Path

from megalaunch.launchers.launcher import Job
from megalaunch.schema.kubernetes import KubernetesSpec
from megalaunch.schema.launcher import LauncherSpec

FULL = {
    "image": "me/image:1",
    "namespace": "team",
    "service_account": "trainer",
    "image_pull_secrets": ("registry",),
    "working_dir": "/work",
    "volumes": ("data:/work", "/mnt/local:/scratch:ro"),
    "shm": "64Gi",
    "environment": ("NCCL_DEBUG=INFO", "GREETING=$(NNODES) $$ $HOME"),
    "secrets": ("HF_TOKEN=hugging-face/token",),
    "cpu": "96",
    "memory": "900Gi",
    "node_selector": ("gpu=h100", "example.com/zone=a"),
    "tolerations": ("nvidia.com/gpu:NoSchedule", "team=llm", "any"),
    "queue": "training",
}


def job_of(arguments: tuple[str, ...] = ("train", "recipe=tiny"), devices: int = 8, **kubernetes: object) -> Job:
    """Return a job of two nodes with these settings of `launcher.kubernetes`."""
    settings = LauncherSpec(name="kubernetes", kubernetes=KubernetesSpec(**{"image": "me/image:1", **kubernetes}))
    where = Path("/runs/a"), Path("/home/me")
    return Job("llama", 2, devices, arguments, *where, settings, "nvidia.com/gpu")
