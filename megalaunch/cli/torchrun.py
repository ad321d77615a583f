"""Refuse `torchrun -m megalaunch train ...`: megalaunch starts its workers itself."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence

STARTS_WORKERS = ("train", "sweep", "generate", "evaluate")
_QUIET_SECONDS = 15.0
EXIT_CODE = 2


def is_torchrun_worker(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if torchrun started this process as one of several that would launch the same run."""
    return bool(arguments) and arguments[0] in STARTS_WORKERS and {"TORCHELASTIC_RUN_ID", "RANK"} <= set(environment)


def refuse_torchrun(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print the advice once per machine; return the exit code.

    The other workers wait, since torchrun ends all workers when one ends.
    """
    if environment.get("LOCAL_RANK", "0") == "0":
        print(advice(arguments, environment), file=sys.stderr, flush=True)
    else:
        time.sleep(_QUIET_SECONDS)
    return EXIT_CODE


def advice(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the message with the command line that starts as many workers as torchrun did."""
    typed, machines = list(arguments), int(environment.get("GROUP_WORLD_SIZE", "1"))
    if arguments[0] in ("train", "sweep"):
        wanted = {
            "cluster.nodes": str(machines) if machines > 1 else "",
            "cluster.devices_per_node": environment.get("LOCAL_WORLD_SIZE", ""),
        }
        typed += [
            f"{key}={value}"
            for key, value in wanted.items()
            if value and not any(argument.lstrip("+").startswith(f"{key}=") for argument in arguments)
        ]
    then = ""
    if machines > 1 and arguments[0] == "train":
        typed.append("--prepare-only")
        then = " on one machine, then on each machine the command that it prints"
    command = shlex.join(["megalaunch", *typed])
    count = environment.get("WORLD_SIZE", "several")
    return f"error: torchrun started megalaunch {count} times, but it starts its workers itself; type: {command}{then}"
