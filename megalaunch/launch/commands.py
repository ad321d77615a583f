"""The command that starts each machine's elastic agent, as argument lists; never a shell string built from values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalaunch.config.schema import RunSpec
from megalaunch.rundir.environment import LAUNCHER_PID_VARIABLE

WORKER_MODULE = "megalaunch.engine.worker"
RENDEZVOUS_PORT = 29400  # torchrun's own default
_FIRST_NODE = "NODE0"  # stands for the first machine's address where no launcher knows it


def node_commands(
    spec: RunSpec, spec_file: Path, worker_module: str = WORKER_MODULE, max_restarts: int | None = None
) -> list[list[str]]:
    """One argument list a machine, in machine order, for a spec whose `auto` values are resolved.

    On a single machine the agent picks a free port itself (bound before it is told to anyone, so nobody can take
    it in between). On several, the first one hosts the rendezvous, and each command says whether it is the host:
    an address that resolves to the loopback device would otherwise make none of them the host.

    `max_restarts` is the agent's own, the spec's where nobody else starts an agent that has ended.
    """
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={spec.cluster.devices_per_node}"]
    restarts = spec.launcher.max_restarts if max_restarts is None else max_restarts
    worker = [f"--max-restarts={restarts}", "-m", worker_module, str(spec_file)]
    if spec.cluster.nodes == 1:
        return [[*agent, "--standalone", "--local-addr=localhost", *worker]]
    # Else workers that are started again read the addresses of dead ones from the store that the agents share.
    fresh_store = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    meeting = [
        f"--nnodes={spec.cluster.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={_FIRST_NODE}:{RENDEZVOUS_PORT}",
        f"--rdzv-id={spec.run.name}",
    ]
    return [
        [*fresh_store, *agent, *meeting, f"--rdzv-conf=is_host={int(node == 0)}", *worker]
        for node in range(spec.cluster.nodes)
    ]


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
