"""Rules of the room on the machine that a run is for: host memory of processors' workers, and free disk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megalaunch.plan.memory.model_states import MOMENTS, main_param_bytes
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.rules.memory import fullest, smaller
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import suggestions_enabled

_GB = 1e9
_PROCESS = 0.4e9
"""Bytes of a worker before it has a model: Python, torch and its libraries."""
_CANDIDATES = 12


@rule("memory.host", "Workers on processors fit into the machine's memory together.")
def host(at: RuleContext) -> Iterator[Violation]:
    """Beyond it the machine swaps, or its kernel ends a worker."""
    workers = at.spec.cluster.devices_per_node
    if (
        at.local_machine is None
        or at.local_machine.chip.device != "cpu"
        or not isinstance(workers, int)
        or not at.local_machine.memory_bytes
    ):
        return
    room, memory = at.local_machine.memory_bytes, fullest(at)
    if memory is None or workers * (memory.total + _PROCESS) <= room:
        return
    need = workers * (memory.total + _PROCESS)
    yield Violation(
        "batch.micro_batch_size",
        f"{workers} worker{'s' if workers > 1 else ''} of {memory.total / _GB:.1f} GB, with {_PROCESS / _GB:.1f} GB "
        f"each for libraries, need {need / _GB:.1f} GB, and this machine has {room / _GB:.1f} GB",
        {"workers": workers, "bytes": round(need), "host_bytes": room},
        tuple(islice(smaller(at, room / workers - _PROCESS), _CANDIDATES)) if suggestions_enabled() else (),
        at.pre_launch_severity if workers * memory.total > room else "warning",
    )


@rule("checkpoint.free_disk", "The checkpoints that are kept fit on the disk of the run directory.")
def free_disk(at: RuleContext) -> Iterator[Violation]:
    """A new one is written before an old one goes. Megatron finds a full disk out when it saves."""
    if at.local_machine is None or at.spec.run.directory is None:
        return
    directory, size, count = Path(at.spec.run.directory), _checkpoint_bytes(at), _most_kept(at)
    free = at.local_machine.free_disk(directory)
    if size is None or free is None:
        return
    free += _held(directory)
    if count * size <= free:
        return
    message = f"a checkpoint is {size / _GB:.3g} GB, and the run directory's disk has {free / _GB:.3g} GB free"
    if size <= free:
        message += f": {count} at a time, with the one being written, are {count * size / _GB:.3g} GB"
    yield Violation(
        "run.directory",
        f"{message}; a larger disk is named by run.directory=PATH",
        {"checkpoint_bytes": size, "checkpoints": count, "free_bytes": free},
        tuple(_fewer(at, free // size)),
        at.pre_launch_severity if size > free else "warning",
    )


def _checkpoint_bytes(at: RuleContext) -> int | None:
    """Master weights and moments of every parameter; None while the model is open."""
    spec = at.spec
    if None in (spec.model.head_dim, spec.model.num_query_groups, spec.model.vocab_size):
        return None
    moment = 2 if spec.precision.exp_avg_dtype == "bf16" else 4
    return count_parameters(spec.model).total * (main_param_bytes(spec) + MOMENTS[spec.optimizer.name] * moment)


def _most_kept(at: RuleContext) -> int:
    """Checkpoints that are there at once at most."""
    kept, steps = at.spec.checkpoint, at.spec.train.steps
    if not kept.interval:
        return 1
    written = -(-steps // kept.interval)
    for_good = steps // kept.keep_every if kept.keep_every else 0
    return min(written, for_good + kept.keep_last + 1) if kept.keep_last else written


def _fewer(at: RuleContext, fitting: int) -> Iterator[Fix]:
    """Ways to keep no more than fit: the most of the newest, with those for good and without."""
    last = min(at.spec.checkpoint.keep_last or fitting, fitting - 1)
    if last >= 1:
        yield {"checkpoint.keep_last": last}
        yield {"checkpoint.keep_last": last, "checkpoint.keep_every": 0}
    if fitting >= 1:
        yield {"checkpoint.interval": 0, "checkpoint.keep_every": 0}


def _held(directory: Path) -> int:
    """Bytes of the run's own checkpoints that are there already: newer ones take their place."""
    try:
        return sum(file.stat().st_size for file in directory.glob("checkpoints/*/*"))
    except (OSError, ValueError):  # not readable; no path at all
        return 0
