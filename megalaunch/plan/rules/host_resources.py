"""Rules of the resources of this machine: host memory of CPU workers, and free disk space."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megalaunch.plan.memory.checkpoint_sizes import checkpoint_bytes, host_checkpoint_bytes
from megalaunch.plan.rules.memory import peak_memory, smaller
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import suggestions_enabled

_GB = 1e9
_PROCESS = 0.4e9
"""Bytes of a worker without a model: Python, torch and its libraries."""
_CANDIDATES = 12


@rule("memory.host", "CPU workers fit into the memory of the machine.")
def host(at: RuleContext) -> Iterator[Violation]:
    """Otherwise the machine swaps, or its kernel kills a worker."""
    workers = at.spec.cluster.devices_per_node
    if (
        at.local_machine is None
        or at.local_machine.chip.device != "cpu"
        or not isinstance(workers, int)
        or not at.local_machine.memory_bytes
    ):
        return
    host_bytes, memory, saved = at.local_machine.memory_bytes, peak_memory(at), host_checkpoint_bytes(at.spec)
    if memory is None or workers * (memory.total + _PROCESS) + saved <= host_bytes:
        return
    need = workers * (memory.total + _PROCESS) + saved
    checkpoints = f" and {saved / _GB:.1f} GB of checkpoints in memory" if saved else ""
    yield Violation(
        "batch.micro_batch_size",
        f"{workers} worker{'s' if workers > 1 else ''} of {memory.total / _GB:.1f} GB, with {_PROCESS / _GB:.1f} GB "
        f"each for libraries{checkpoints}, need {need / _GB:.1f} GB, but this machine has {host_bytes / _GB:.1f} GB",
        {"workers": workers, "bytes": round(need), "host_bytes": host_bytes},
        tuple(_lighter(at, (host_bytes - saved) / workers - _PROCESS)) if suggestions_enabled() else (),
        at.pre_launch_severity if workers * memory.total > host_bytes else "warning",
    )


def _lighter(at: RuleContext, limit: float) -> Iterator[Fix]:
    """Yield fixes without checkpoints in host memory, and those with which a worker needs at most `limit` bytes."""
    if at.spec.checkpoint.memory.interval:
        yield {"checkpoint.memory.interval": 0}
    if at.spec.checkpoint.async_save:
        yield {"checkpoint.async_save": False}
    yield from islice(smaller(at, limit), _CANDIDATES)


@rule("checkpoint.free_disk", "The retained checkpoints fit on the disk of the run directory.")
def free_disk(at: RuleContext) -> Iterator[Violation]:
    """A new checkpoint is written before an old one is deleted. Megatron-LM notices a full disk when it saves."""
    if at.local_machine is None or at.spec.run.directory is None:
        return
    directory, size, count = Path(at.spec.run.directory), checkpoint_bytes(at.spec), _max_checkpoints(at)
    free = at.local_machine.free_disk(directory)
    if size is None or free is None:
        return
    free += _existing_bytes(directory)
    if count * size <= free:
        return
    message = f"a checkpoint is {size / _GB:.3g} GB, and the run directory's disk has {free / _GB:.3g} GB free"
    if size <= free:
        message += f": {count} at a time, with the one being written, are {count * size / _GB:.3g} GB"
    yield Violation(
        "run.directory",
        f"{message}; run.directory=PATH selects another disk",
        {"checkpoint_bytes": size, "checkpoints": count, "free_bytes": free},
        tuple(_fewer(at, free // size)),
        at.pre_launch_severity if size > free else "warning",
    )


def _max_checkpoints(at: RuleContext) -> int:
    """Return the largest number of checkpoints on disk at once."""
    checkpoint, steps = at.spec.checkpoint, at.spec.train.steps
    if not checkpoint.interval:
        return 1
    written = -(-steps // checkpoint.interval)
    permanent = steps // checkpoint.keep_every if checkpoint.keep_every else 0
    return min(written, permanent + checkpoint.keep_last + 1) if checkpoint.keep_last else written


def _fewer(at: RuleContext, fitting: int) -> Iterator[Fix]:
    """Yield fixes that retain at most `fitting` checkpoints."""
    last = min(at.spec.checkpoint.keep_last or fitting, fitting - 1)
    if last >= 1:
        yield {"checkpoint.keep_last": last}
        yield {"checkpoint.keep_last": last, "checkpoint.keep_every": 0}
    if fitting >= 1:
        yield {"checkpoint.interval": 0, "checkpoint.keep_every": 0}


def _existing_bytes(directory: Path) -> int:
    """Return the bytes of the run's existing checkpoints, which newer ones replace."""
    try:
        return sum(file.stat().st_size for file in directory.glob("checkpoints/*/*"))
    except (OSError, ValueError):  # not readable; no path at all
        return 0
