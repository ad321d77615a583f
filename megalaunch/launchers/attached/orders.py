"""Write the orders of the nodes: the command as typed, with the variables that tell a node its place."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megalaunch.launchers.attached.remote_agent import NodeOrder
from megalaunch.launchers.launcher import Job
from megalaunch.rundir.environment import ATTEMPT_VARIABLE
from megalaunch.rundir.paths import RunDirectory


def node_orders(
    job: Job,
    copied: Mapping[str, str],
    address: str,
    port: int,
    shared_text: str,
    attempt: int,
    shared_file: Path | None = None,
) -> list[NodeOrder]:
    """Return what each node runs.

    Args:
        copied: variables besides those of the host.
        address: at which all nodes reach node 0; `port` is the first of two ports there.
        shared_text: of a file of the run directory, which a node must see.
        shared_file: that file; None: job.json.
    """
    common = {
        **copied,
        ATTEMPT_VARIABLE: str(attempt),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    shared = str(shared_file or RunDirectory(job.directory).job)
    return [
        NodeOrder(job.arguments, {**common, "GROUP_RANK": str(node)}, str(job.working_directory), shared, shared_text)
        for node in range(job.nodes)
    ]


def check_order(job: Job, shared_text: str) -> NodeOrder:
    """Return an order to look for the files of a run, and to run nothing."""
    return NodeOrder((), {}, str(job.working_directory), str(RunDirectory(job.directory).job), shared_text)


def commands_on_fewer(job: Job) -> Iterator[str]:
    """Yield the command for each smaller number of nodes of a job, each below a line that says so, to be shown."""
    for nodes, arguments in job.fewer.items():
        yield f"# on {nodes} node{'s' if nodes > 1 else ''}, after others were lost"
        yield shlex.join(["megalaunch", *arguments])


def copied_variables(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the variables whose names fit one of the patterns."""
    return {name: value for name, value in environment.items() if any(fnmatchcase(name, p) for p in patterns)}


def hidden_values(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with their names in place of their values, to be shown."""
    return {name: f"<value of {name}>" for name in environment}
