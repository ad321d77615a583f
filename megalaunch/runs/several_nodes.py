"""Decide how a run starts in an allocation of several nodes: on this node as one of them, or on every node by srun."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn

import typer

from megalaunch.launchers.slurm.batch_script import srun_options
from megalaunch.plan.findings import Finding
from megalaunch.platform.allocation import KUBERNETES_JOB, Allocation, NodePlace
from megalaunch.schema import RunSpec

if TYPE_CHECKING:
    from megalaunch.launch.stop import StopSignals
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.rundir.paths import RunDirectory

Start = Literal["here", "node", "pod", "srun", "job", "hand"]
"""Where a run starts: on this machine alone; on this node as on every other; in this pod, if the pods choose those that
take part; on every node by srun; as a job of its launcher; by pasted lines."""

MULTI_NODE = "launcher.multi_node"
# What a job asked for each of its own tasks; the launcher is the only task of its node, and gets the whole node.
_PER_TASK = (
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_SOCKET",
)


def start_of(spec: RunSpec, allocation: Allocation | None) -> Start:
    """Return how a resolved spec starts from this process."""
    nodes = int(spec.cluster.nodes)
    if allocation is None:
        if spec.launcher.name != "local":
            return "job"
        return "here" if nodes == 1 else "hand"
    if allocation.place is not None and (allocation.nodes or nodes) > 1:
        return "pod" if _is_elastic_pod(spec, allocation) else "node"
    if nodes == 1:
        return "here"
    return "srun" if allocation.srun is not None else "hand"


def _is_elastic_pod(spec: RunSpec, allocation: Allocation) -> bool:
    """Return whether this process is a pod of a run that may continue on fewer; the commands of its nodes are not."""
    is_pod = spec.launcher.name == "kubernetes" and allocation.source == KUBERNETES_JOB
    return is_pod and spec.launcher.min_nodes is not None


def check_nodes(
    findings: Sequence[Finding], start: Start, spec: RunSpec, allocation: Allocation | None, overrides: Sequence[str]
) -> list[Finding]:
    """Return the findings with what `launcher.multi_node` says in this allocation.

    Args:
        overrides: as typed.
    """
    if allocation is None or start == "here":
        return list(findings)
    others = [finding for finding in findings if finding.rule != MULTI_NODE]
    nodes, given = int(spec.cluster.nodes), allocation.nodes or int(spec.cluster.nodes)
    message = None
    if start == "hand" and given > 1:
        message = _what_to_type(allocation, nodes, overrides)
    elif nodes > given or (start in ("node", "pod") and nodes != given):
        message = f"the run has {nodes} node{'s' if nodes > 1 else ''}, but the {allocation.source} has {given}"
    elif start in ("node", "pod") and allocation.place is not None and allocation.place.rank >= nodes:
        message = f"this is node {allocation.place.rank} of the {allocation.source}, but the run has only {nodes}"
    elif start == "hand":
        return list(findings)
    if message is None:
        return others
    fixes = (f"cluster.nodes={given}",) if nodes != given else ()
    numbers = {"nodes": nodes, "allocated": given}
    return [*others, Finding(MULTI_NODE, "error", "cluster.nodes", message, numbers, fixes)]


def _what_to_type(allocation: Allocation, nodes: int, overrides: Sequence[str]) -> str:
    command = shlex.join(["megalaunch", "train", *overrides])
    if allocation.source.startswith("Slurm"):
        return (
            f"the {allocation.source} has {allocation.nodes} nodes, and srun is not found here; "
            f"type: srun --nodes={nodes} --ntasks-per-node=1 {command}"
        )
    return (
        f"the {allocation.source} has {allocation.nodes} nodes, and no variable gives the rank of this one; type on "
        f"every node, with its rank N: GROUP_RANK=N GROUP_WORLD_SIZE={nodes} MASTER_ADDR=NODE0 {command}"
    )


def start_by_srun(spec: RunSpec, overrides: Sequence[str], allocation: Allocation) -> NoReturn:
    """Replace this process by srun, which starts the same command once on every node."""
    assert allocation.srun is not None, "start_of saw srun"
    command = srun_command(int(spec.cluster.nodes), overrides)
    typer.echo(f"the {allocation.source} has {allocation.nodes} nodes: {shlex.join(command)}")
    sys.stdout.flush()
    os.execve(allocation.srun, command, whole_node(os.environ))


def srun_command(nodes: int, overrides: Sequence[str]) -> list[str]:
    """Return the command that starts one launcher on each node; a launcher that fails ends the others."""
    return ["srun", *srun_options(nodes), sys.executable, "-m", "megalaunch", "train", *overrides]


def whole_node(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which srun gives its one task of a node everything that the job has there."""
    return {name: value for name, value in environment.items() if name not in _PER_TASK}


def join_run(spec: RunSpec, directory: RunDirectory, place: NodePlace, cores: int, stop: StopSignals) -> ExitCode:
    """Take part in a run as one of the nodes after the first; return the exit code."""
    from megalaunch.launch.join import JoinError, wait_for_launch
    from megalaunch.launch.node import NodeAgent, run_other_node
    from megalaunch.runs.errors import fail

    def say(line: str) -> None:
        typer.echo(f"megalaunch: {line}", err=True)

    try:
        wait_for_launch(directory, place, say)
    except JoinError as error:
        fail(str(error), error.exit_code)
    return run_other_node(spec, directory, NodeAgent(spec, directory, place, cores), stop)
