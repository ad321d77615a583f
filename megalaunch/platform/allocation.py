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
        node_rank: rank of this node if this command runs once on every node; None: it runs on one node only.
        first_node: address of node 0; None: unknown.
    """

    source: str
    nodes: int
    devices_per_node: int | None
    node_rank: int | None
    first_node: str | None


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
    return Allocation("torchrun's variables", world // local, local, _rank(environ, "GROUP_RANK"), _first(environ))


def _kubernetes(environ: Mapping[str, str]) -> Allocation | None:
    """Read what Kubeflow's trainer sets in each pod (PET_*), or WORLD_SIZE and RANK as counts of pods."""
    nodes, rank = _count(environ, "PET_NNODES"), _rank(environ, "PET_NODE_RANK")
    if nodes is None and "KUBERNETES_SERVICE_HOST" in environ:
        nodes, rank = _count(environ, "WORLD_SIZE"), _rank(environ, "RANK")
    if nodes is None:
        return None
    if rank is None:  # an indexed Job, also below a JobSet
        rank = _rank(environ, "JOB_COMPLETION_INDEX")
    return Allocation("Kubernetes job", nodes, _count(environ, "PET_NPROC_PER_NODE"), rank, _first(environ))


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    nodes = _count(environ, "SLURM_JOB_NUM_NODES") or _count(environ, "SLURM_NNODES")
    if nodes is None:
        return None
    devices = _count(environ, "SLURM_GPUS_ON_NODE") or _typed_count(environ.get("SLURM_GPUS_PER_NODE", ""))
    on_every_node = _count(environ, "SLURM_STEP_NUM_NODES") == nodes == _count(environ, "SLURM_STEP_NUM_TASKS")
    rank = _rank(environ, "SLURM_NODEID") if on_every_node else None
    return Allocation("Slurm job", nodes, devices, rank, _first_host(environ.get("SLURM_JOB_NODELIST", "")))


def _first(environ: Mapping[str, str]) -> str | None:
    return environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR")


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """Return a positive number; None for another text (`auto`, an elastic `1:4`)."""
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text) else None


def _rank(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else None


def _typed_count(text: str) -> int | None:
    """Return the number of `8`, `h100:8` or `gpu:h100:8`; of `a100:4,h100:4` their sum."""
    counts = re.findall(r"(?:^|[:,])([0-9]{1,4})(?=$|,)", text)
    return sum(map(int, counts)) or None


def _first_host(hosts: str) -> str | None:
    """Return the first host of Slurm's list: `node03` of `node[03-07,12],login1`."""
    match = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", hosts)
    if match is None or not match[0]:
        return None
    return match[1] + (match[2] or "") + (match[3] or "")
