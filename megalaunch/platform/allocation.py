"""Read the nodes that a scheduler gave to this process: Slurm, Kubernetes (Kubeflow, JobSet) or torchrun variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """Nodes given to this process.

    Attributes:
        source: who gave them, for messages.
        nodes: number of nodes.
        devices_per_node: None: unknown.
    """

    source: str
    nodes: int
    devices_per_node: int | None


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this process, the innermost first; None without one. Never raises."""
    for read in (_torchrun, _kubernetes, _slurm):
        found = read(environ)
        if found is not None:
            return found
    return None


def _torchrun(environ: Mapping[str, str]) -> Allocation | None:
    world, local = _count(environ, "WORLD_SIZE"), _count(environ, "LOCAL_WORLD_SIZE")
    if world is None or local is None or world % local:
        return None
    return Allocation("torchrun's variables", world // local, local)


def _kubernetes(environ: Mapping[str, str]) -> Allocation | None:
    """Read what Kubeflow's trainer sets in each pod (PET_*), or WORLD_SIZE as the count of pods."""
    nodes = _count(environ, "PET_NNODES")
    if nodes is None and "KUBERNETES_SERVICE_HOST" in environ:
        nodes = _count(environ, "WORLD_SIZE")
    return None if nodes is None else Allocation("Kubernetes job", nodes, _count(environ, "PET_NPROC_PER_NODE"))


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    nodes = _count(environ, "SLURM_JOB_NUM_NODES") or _count(environ, "SLURM_NNODES")
    if nodes is None:
        return None
    devices = _count(environ, "SLURM_GPUS_ON_NODE") or _typed_count(environ.get("SLURM_GPUS_PER_NODE", ""))
    return Allocation("Slurm job", nodes, devices)


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """Return a positive number; None for another text (`auto`, an elastic `1:4`)."""
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text) else None


def _typed_count(text: str) -> int | None:
    """Return the number of `8`, `h100:8` or `gpu:h100:8`; of `a100:4,h100:4` their sum."""
    counts = re.findall(r"(?:^|[:,])([0-9]{1,4})(?=$|,)", text)
    return sum(map(int, counts)) or None
