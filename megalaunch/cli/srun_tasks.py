"""Refuse `srun --ntasks-per-node=8 megalaunch train ...`: megalaunch runs once per node and starts its workers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

from megalaunch.cli.torchrun import EXIT_CODE, STARTS_WORKERS


def is_one_of_several_tasks(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if srun started this process as one of several on its node that would launch the same run."""
    tasks, nodes = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_STEP_NUM_NODES", "")
    several = tasks.isdecimal() and nodes.isdecimal() and int(tasks) > int(nodes)
    return several and bool(arguments) and arguments[0] in STARTS_WORKERS


def refuse_tasks(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print the advice once per step; return the exit code."""
    if environment.get("SLURM_PROCID", "0") == "0":
        print(advice(arguments, environment), file=sys.stderr, flush=True)
    return EXIT_CODE


def advice(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the message with the command that starts one launcher per node."""
    tasks, nodes = environment["SLURM_STEP_NUM_TASKS"], environment["SLURM_STEP_NUM_NODES"]
    command = shlex.join(["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "megalaunch", *arguments])
    several = f"{nodes} node{'s' if int(nodes) > 1 else ''}"
    return (
        f"error: srun started megalaunch {tasks} times on {several}, but it starts its workers itself; type: {command}"
    )
