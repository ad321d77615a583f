"""Read the nodes that a scheduler gave this process, from variables of Slurm, Kubernetes, SkyPilot or torchrun."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29400  # torchrun's own default
KUBERNETES_JOB = "Kubernetes job"
"""The source of an allocation that is one of the pods of a job."""
_PORTS = 500  # pairs of ports over which Slurm jobs on the same nodes are spread


@dataclass(frozen=True)
class NodePlace:
    """The place of a process that its scheduler started once on each node.

    Attributes:
        rank: rank of this node, from 0.
        first_node: name or address of node 0.
        port: first of two ports on node 0.
        appears_late: the name of node 0 may be unknown until node 0 runs.
    """

    rank: int
    first_node: str
    port: int = DEFAULT_PORT
    appears_late: bool = False

    def __str__(self) -> str:
        return f"{self.first_node}:{self.port}"


@dataclass(frozen=True)
class Allocation:
    """Nodes given to this process.

    Attributes:
        source: who gave them, for messages.
        nodes: number of nodes; None: unknown.
        devices_per_node: None: unknown.
        place: None: this process was started once, for all nodes.
        srun: path of the program that starts a command on every node; None: there is none, or it is not needed.
    """

    source: str
    nodes: int | None
    devices_per_node: int | None
    place: NodePlace | None = None
    srun: str | None = None


def find_allocation(environ: Mapping[str, str], host_name: Callable[[], str] = socket.getfqdn) -> Allocation | None:
    """Return the allocation of this process, the innermost first; None without one. Never raises.

    Args:
        host_name: returns the full name of this host.
    """
    return _torchrun(environ) or _skypilot(environ) or _kubernetes(environ, host_name) or _slurm(environ)


def _torchrun(environ: Mapping[str, str]) -> Allocation | None:
    """Read what torchrun sets for its workers, or what a platform sets in its place on each node."""
    world, local = _count(environ, "WORLD_SIZE"), _count(environ, "LOCAL_WORLD_SIZE")
    place = _place(environ, _first_rank(environ, "GROUP_RANK", "NODE_RANK"))
    if world is not None and local is not None and world % local == 0:
        return Allocation("torchrun job", world // local, local, place)
    nodes = _count(environ, "GROUP_WORLD_SIZE") or _count(environ, "NNODES")
    return None if nodes is None or place is None else Allocation("torchrun job", nodes, local, place)


def _skypilot(environ: Mapping[str, str]) -> Allocation | None:
    """Read what SkyPilot sets for the `run` commands of a task, which start on every node."""
    nodes, addresses = _count(environ, "SKYPILOT_NUM_NODES"), environ.get("SKYPILOT_NODE_IPS", "").split()
    if nodes is None or not addresses:
        return None
    place = _place(environ, _first_rank(environ, "SKYPILOT_NODE_RANK"), lambda: addresses[0])
    return Allocation("SkyPilot task", nodes, _count(environ, "SKYPILOT_NUM_GPUS_PER_NODE"), place)


def _kubernetes(environ: Mapping[str, str], host_name: Callable[[], str]) -> Allocation | None:
    """Read what Kubeflow's trainer sets in each pod (PET_*), or a job's index of the pod, WORLD_SIZE or NNODES.

    A job does not tell its pods their number, so that it may be open here.
    """
    nodes = _count(environ, "PET_NNODES")
    if nodes is None and "KUBERNETES_SERVICE_HOST" in environ:
        nodes = _count(environ, "WORLD_SIZE") or _count(environ, "NNODES")
    index = environ.get("JOB_COMPLETION_INDEX")
    if nodes is None and index is None:
        return None
    rank = _first_rank(environ, "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
    place = _place(environ, rank, lambda: _first_pod(host_name(), rank), appears_late=True)
    return Allocation(KUBERNETES_JOB, nodes, _count(environ, "PET_NPROC_PER_NODE"), place)


def _first_pod(name: str, rank: int | None) -> str | None:
    """Return the host name of pod 0 from that of pod `rank`: `job-0.service...` of `job-1.service...`."""
    pod, dot, rest = name.partition(".")
    stem, found, index = pod.rpartition("-")
    return f"{stem}-0{dot}{rest}" if found and index == str(rank) else None


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    """Read a step (what srun started), else the job (a batch script, salloc, or salloc's interactive step).

    A batch script has SLURM_NODEID=0 too, so that only the step's own variables show one task a node.
    """
    job_nodes = _count(environ, "SLURM_JOB_NUM_NODES") or _count(environ, "SLURM_NNODES")
    if job_nodes is None:
        return None
    devices = _count(environ, "SLURM_GPUS_ON_NODE") or _typed_count(environ.get("SLURM_GPUS_PER_NODE", ""))
    step_nodes = _count(environ, "SLURM_STEP_NUM_NODES")
    if _first_rank(environ, "SLURM_STEP_ID") is not None and step_nodes is not None:
        names, rank = environ.get("SLURM_STEP_NODELIST", ""), _first_rank(environ, "SLURM_NODEID")
        job = _first_rank(environ, "SLURM_JOB_ID") or 0
        place = _place(environ, rank, lambda: _first_host(names), DEFAULT_PORT + 2 * (job % _PORTS))
        return Allocation("Slurm step", step_nodes, devices, place)
    srun = shutil.which("srun", path=environ.get("PATH", "")) if job_nodes > 1 else None
    return Allocation("Slurm job", job_nodes, devices, srun=srun)


def _first_host(names: str) -> str | None:
    """Return the first host of Slurm's list of hosts: `n01` of `n[01-04,7],m5`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", names)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else None


def _place(
    environ: Mapping[str, str],
    rank: int | None,
    first_node: Callable[[], str | None] = lambda: None,
    port: int = DEFAULT_PORT,
    appears_late: bool = False,
) -> NodePlace | None:
    """Return the place of rank `rank`; PET_MASTER_ADDR, MASTER_ADDR and their ports take precedence."""
    if rank is None:
        return None
    host = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR") or first_node()
    given = _count(environ, "PET_MASTER_PORT") or _count(environ, "MASTER_PORT")
    return NodePlace(rank, host, given or port, appears_late) if host else None


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """Return a positive number; None for another text (`auto`, an elastic `1:4`)."""
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text) else None


def _first_rank(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the number, from 0, of the first variable that has one of at most 9 digits."""
    texts = (environ.get(name, "") for name in names)
    return next((int(text) for text in texts if re.fullmatch(r"[0-9]{1,9}", text)), None)


def _typed_count(text: str) -> int | None:
    """Return the number of `8`, `h100:8` or `gpu:h100:8`; of `a100:4,h100:4` their sum."""
    counts = re.findall(r"(?:^|[:,])([0-9]{1,4})(?=$|,)", text)
    return sum(map(int, counts)) or None
