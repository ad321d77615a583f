"""Playing the nodes of an allocation on this machine: their variables, and processes that leave nothing behind."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from h100_stand_in import start_on_h100
from training import tiny_overrides
from warm_process import COLD_MEGALAUNCH

from megalaunch.platform.allocation import DEFAULT_PORT
from megalaunch.process import descendants, kill_all

StartWithin = Callable[[int], AbstractContextManager[object]]  # of a node: what it is started within


@dataclass(frozen=True)
class Ended:
    """A process that has ended, with its output."""

    returncode: int
    output: str


def free_ports() -> int:
    """The first of two free ports, below those that the kernel gives to connections: they stay free in a restart.

    They are also below those that runs in Slurm jobs have by default, which tests at the same time may have.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, DEFAULT_PORT - 1)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def slurm_step(node: int, port: int) -> dict[str, str]:
    """The variables of one task a node that srun sets (read from Slurm 22.05)."""
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "MASTER_PORT": str(port),
    }


def torchrun_variables(node: int, port: int) -> dict[str, str]:
    """The variables that torchrun names, as a platform sets them on each node."""
    return {
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def indexed_job(node: int, port: int) -> dict[str, str]:
    """The variables of a pod of a Kubernetes Indexed Job; MASTER_ADDR and MASTER_PORT are of its manifest."""
    return {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": str(node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def start_nodes(
    folder: Path,
    variables: Callable[[int, int], dict[str, str]],
    *more: str,
    start_within: StartWithin = nullcontext,
    is_forked: bool = True,
    **environment: str,
) -> list[subprocess.Popen[str]]:
    """Two nodes with fake workers, each by the same command; see `start_on_h100` for `is_forked`."""
    port = free_ports()
    overrides = tiny_overrides(folder, "cluster.nodes=2", "cluster.devices_per_node=1", *more)
    nodes = []
    for node in range(2):
        with start_within(node):
            of_node = {"is_forked": is_forked, **variables(node, port), **environment}
            nodes.append(start_on_h100(0, folder, "train", *overrides, **of_node))
    return nodes


def start_training_nodes(
    folder: Path, *more: str, shared: Path, start_within: StartWithin = nullcontext, **environment: str
) -> list[subprocess.Popen[str]]:
    """Two nodes of a Slurm step with real workers, one each."""
    port = free_ports()
    overrides = tiny_overrides(folder, "cluster.nodes=2", "cluster.devices_per_node=1", *more, shared=shared)
    nodes = []
    for node in range(2):
        with start_within(node):
            nodes.append(
                subprocess.Popen(
                    [*COLD_MEGALAUNCH, "train", *overrides],
                    cwd=folder,
                    env={**os.environ, **slurm_step(node, port), **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return nodes


@contextmanager
def ended_processes(processes: Sequence[subprocess.Popen[str]], seconds: float = 120) -> Iterator[list[Ended]]:
    """Wait for the processes; nothing that they started is left, whatever happens."""
    with killed_on_failure(processes):
        for process in processes:
            process.communicate(timeout=seconds)
    yield _ended(processes)


@contextmanager
def killed_on_failure(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """If the body fails, kill the processes and all that they started without a wait, and print their outputs."""
    try:
        yield
    except BaseException:
        for number, ended in enumerate(_ended(processes)):
            print(f"-- process {number}, exit code {ended.returncode}:\n{ended.output}")
        raise


def _ended(processes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """Kill what is left of the processes, and return them with their whole outputs."""
    for process in processes:
        left = descendants(process.pid)
        process.kill()
        kill_all(left, 5)
    outputs = [process.communicate()[0] for process in processes]
    return [Ended(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
