"""The command that starts each machine's elastic agent, as argument lists; never a shell string built from values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalaunch.config.schema import RunSpec
from megalaunch.rundir.environment import LAUNCHER_PID_VARIABLE

AGENT_MODULE = "megalaunch.engine.agent"
WORKER_MODULE = "megalaunch.engine.worker"
RENDEZVOUS_PORT = 29400  # torchrun's own default
_FIRST_NODE = "NODE0"  # stands for the first machine's address where no launcher knows it


def node_commands(
    spec: RunSpec, spec_file: Path, worker_module: str = WORKER_MODULE, max_restarts: int | None = None
) -> list[list[str]]:
    """One argument list a machine, in machine order, for a spec whose `auto` values are resolved.

    The agent is torch's elastic agent behind a rendezvous of ours: torchrun's own listens on every interface and
    unpickles what it finds there. Everything but this machine's number stands in the spec and beside it.

    `max_restarts` is the agent's own; None is the spec's, where nobody else starts an agent that has ended.
    """
    agent = [sys.executable, "-m", AGENT_MODULE]
    if max_restarts is not None:
        agent.append(f"--max-restarts={max_restarts}")
    worker = ["-m", worker_module, str(spec_file)]
    if spec.cluster.nodes == 1:
        return [[*agent, *worker]]
    first = f"--first-node={_FIRST_NODE}:{RENDEZVOUS_PORT}"
    return [[*agent, f"--node-rank={node}", first, *worker] for node in range(spec.cluster.nodes)]


def shown_commands(commands: Sequence[Sequence[str]]) -> list[str]:
    """The same commands as lines to paste into a shell, each under a comment where there are several."""
    if len(commands) == 1:
        return [shlex.join(commands[0])]
    lines = [f"# {_FIRST_NODE} is the address of the first machine, reachable from the others"]
    for node, command in enumerate(commands):
        lines += [f"# machine {node}", shlex.join(command)]
    return lines


def agent_environment(environment: Mapping[str, str], launcher_pid: int, workers: int, cores: int) -> dict[str, str]:
    """The agent's environment: the user's own, the launcher's pid, and an equal share of the cores for each worker."""
    share = str(max(1, cores // max(1, workers)))
    return {"OMP_NUM_THREADS": share, **environment, LAUNCHER_PID_VARIABLE: str(launcher_pid)}
