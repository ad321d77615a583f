"""Build the command that starts each node's elastic agent, as an argv list; never a shell string built from values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalaunch.platform.allocation import DEFAULT_PORT
from megalaunch.rundir.environment import HANGS_WATCHED_VARIABLE, LAUNCHER_PID_VARIABLE
from megalaunch.schema import RunSpec

AGENT_MODULE = "megalaunch.engine.agent"
WORKER_MODULE = "megalaunch.engine.worker"
_FIRST_NODE = "NODE0"  # placeholder for the first node's address where no launcher sets it


def node_commands(
    spec: RunSpec,
    spec_file: Path,
    worker_module: str = WORKER_MODULE,
    max_restarts: int | None = None,
    first_node: str = f"{_FIRST_NODE}:{DEFAULT_PORT}",
) -> list[list[str]]:
    """Return one argv list per node, in node order, for a spec whose `auto` values are resolved.

    The agent is torch's elastic agent with a rendezvous of this project: torchrun's own listens on every interface and
    unpickles what it receives. All settings but the node's rank are in the spec and the files next to it.
    On CPUs it forks the workers, so that torch is imported once; a forked worker must not use a GPU.

    Args:
        max_restarts: the agent's own restarts; None takes the spec's, for launches in which nothing else restarts an
            agent.
        first_node: HOST:PORT on which the agent of node 0 listens; a placeholder in lines to paste.
    """
    agent = [sys.executable, "-m", AGENT_MODULE]
    if max_restarts is not None:
        agent.append(f"--max-restarts={max_restarts}")
    if worker_module == WORKER_MODULE and spec.platform.chip == "cpu":
        agent.append("--fork")
    worker = ["-m", worker_module, str(spec_file)]
    nodes = int(spec.cluster.nodes)
    if nodes == 1:
        return [[*agent, *worker]]
    return [[*agent, f"--node-rank={node}", f"--first-node={first_node}", *worker] for node in range(nodes)]


def shown_commands(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return the commands as shell lines to paste, each below a comment where there are several."""
    if len(commands) == 1:
        return [shlex.join(commands[0])]
    lines = [f"# {_FIRST_NODE} is the address of node 0, reachable from the other nodes"]
    for node, command in enumerate(commands):
        lines += [f"# node {node}", shlex.join(command)]
    return lines


def agent_environment(
    environment: Mapping[str, str], launcher_pid: int | None, workers: int, cores: int
) -> dict[str, str]:
    """Return the agent's environment: the user's, the launcher's variables, and OMP_NUM_THREADS if it is not set.

    Each worker gets an equal share of the CPU cores, at least one.

    Args:
        launcher_pid: None for an agent that restarts its workers and writes the outcome itself.
    """
    share = str(max(1, cores // max(1, workers)))
    launcher = {} if launcher_pid is None else {LAUNCHER_PID_VARIABLE: str(launcher_pid)}
    return {"OMP_NUM_THREADS": share, **environment, HANGS_WATCHED_VARIABLE: "1", **launcher}
