"""Rules of `checkpoint.memory` and `checkpoint.local`: folders of the nodes, intervals, and room for the shards."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from megalaunch.plan.memory.checkpoint_sizes import held_bytes, node_checkpoint_bytes, node_parts_at_once
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.schema.local_checkpoint import LocalCheckpointSpec, MemoryCheckpointSpec, expand_node_path

_GB = 1e9
_DIGEST = 12 * "[0-9a-f]"  # at the end of the name of a run's folder on its nodes

register_inert(
    InertSetting(
        "checkpoint.local_idle",
        "Other keys of checkpoint.local are set only with checkpoint.local.interval.",
        "Without an interval there are no local checkpoints.",
        ("checkpoint.local.",),
        "checkpoint.local.interval",
        lambda spec: spec.checkpoint.local.interval > 0,
        "there are no local checkpoints (checkpoint.local.interval is 0)",
    )
)
register_inert(
    InertSetting(
        "checkpoint.memory_idle",
        "Other keys of checkpoint.memory are set only with checkpoint.memory.interval.",
        "Without an interval there are no checkpoints in memory.",
        ("checkpoint.memory.",),
        "checkpoint.memory.interval",
        lambda spec: spec.checkpoint.memory.interval > 0,
        "there are no checkpoints in memory (checkpoint.memory.interval is 0)",
    )
)


@rule("checkpoint.local_path", "With checkpoint.local.interval, checkpoint.local.path is an absolute path.")
def local_path(at: RuleContext) -> Iterator[Violation]:
    """It names a folder on a disk of each node. A relative path is below the working directory, which nodes share."""
    local = at.spec.checkpoint.local
    if local.interval > 0 and (local.path is None or not _is_absolute(local.path)):
        named = "no folder is named" if local.path is None else f"{local.path} is not an absolute path"
        yield Violation(
            "checkpoint.local.path",
            f"{named}: local checkpoints need checkpoint.local.path=PATH on a disk of each node",
            fixes=({"checkpoint.local.interval": 0, "checkpoint.local.path": None},),
        )


@rule("checkpoint.memory_path", "With checkpoint.memory.interval, checkpoint.memory.path is an absolute path.")
def memory_path(at: RuleContext) -> Iterator[Violation]:
    """It names a folder in the memory of each node. A relative path is below the working directory."""
    memory = at.spec.checkpoint.memory
    if memory.interval > 0 and not _is_absolute(memory.path):
        yield Violation(
            "checkpoint.memory.path",
            f"{memory.path} is not an absolute path: name a folder in memory (tmpfs) of each node",
            fixes=({"checkpoint.memory.path": "/dev/shm"},),
        )


@rule("checkpoint.memory_interval", "checkpoint.memory.interval is below the others, and divides that of local ones.")
def memory_interval(at: RuleContext) -> Iterator[Violation]:
    """A slower tier saves rarely what a faster one saves often; checkpoints on disk are copied from those in memory."""
    memory, local, shared = (
        at.spec.checkpoint.memory.interval,
        at.spec.checkpoint.local.interval,
        at.spec.checkpoint.interval,
    )
    if not memory:
        return
    if local and (local <= memory or local % memory):
        yield Violation(
            "checkpoint.memory.interval",
            f"local checkpoints, every {local} steps, are copied from those in memory, every {memory} steps: "
            "checkpoint.local.interval is a multiple of checkpoint.memory.interval, and not the same",
            {"memory_interval": memory, "local_interval": local},
            ({"checkpoint.local.interval": 10 * memory}, {"checkpoint.memory.interval": 1}),
        )
    if 0 < shared <= memory:
        yield Violation(
            "checkpoint.memory.interval",
            f"checkpoints in memory every {memory} steps save nothing that those in the run directory, every {shared} "
            "steps, do not",
            {"memory_interval": memory, "interval": shared},
            ({"checkpoint.interval": 100 * memory},),
        )


@rule("checkpoint.local_interval", "checkpoint.local.interval is below checkpoint.interval.")
def local_interval(at: RuleContext) -> Iterator[Violation]:
    """At a step of both only the checkpoint in the run directory is saved, and the newest of all is loaded."""
    shared, local = at.spec.checkpoint.interval, at.spec.checkpoint.local.interval
    if 0 < shared <= local:
        fixes: list[Fix] = [{"checkpoint.local.interval": max(1, shared // 10)}] if shared > 1 else []
        yield Violation(
            "checkpoint.local.interval",
            f"local checkpoints every {local} steps save nothing that those in the run directory, every {shared} "
            "steps, do not",
            {"local_interval": local, "interval": shared},
            (*fixes, {"checkpoint.interval": 10 * local}),
        )


@rule("checkpoint.local_shared", "On several nodes checkpoint.local.path is not on the disk of the run directory.")
def local_shared(at: RuleContext) -> Iterator[Violation]:
    """All nodes share the run directory's file system, which local checkpoints are to relieve."""
    local, directory = at.spec.checkpoint.local, at.spec.run.directory
    folder = expand_node_path(local.path or "") if local.interval > 0 else None
    if folder is None or directory is None or at.machine is None or at.spec.cluster.nodes in ("auto", 1):
        return
    if _device(folder) is not None and _device(folder) == _device(Path(directory).expanduser()):
        yield Violation(
            "checkpoint.local.path",
            f"{folder} is on the file system of run.directory, which several nodes share: name a disk of each node",
            {"nodes": at.spec.cluster.nodes},
            severity="warning",
        )


@rule("checkpoint.local_free_disk", "The retained local checkpoints fit on the disk of a node.")
def local_free_disk(at: RuleContext) -> Iterator[Violation]:
    """A new one is written before an old one is deleted. A disk that is full ends nothing, but saves nothing."""
    fixes: list[Fix] = [{"checkpoint.local.keep": 1}, {"checkpoint.local.keep": 1, "checkpoint.local.replicate": False}]
    fixes.append({"checkpoint.local.interval": 0, "checkpoint.local.path": None})
    return _too_large("checkpoint.local", at.spec.checkpoint.local, at, fixes)


@rule("checkpoint.memory_free", "The retained checkpoints in memory fit into the shared memory of a node.")
def memory_free(at: RuleContext) -> Iterator[Violation]:
    """A tmpfs such as /dev/shm is half of the memory by default. One that is full ends nothing, but saves nothing."""
    fixes: list[Fix] = [
        {"checkpoint.memory.keep": 1},
        {"checkpoint.memory.keep": 1, "checkpoint.memory.replicate": False},
        {"checkpoint.memory.interval": 0},
    ]
    return _too_large("checkpoint.memory", at.spec.checkpoint.memory, at, fixes)


def _too_large(
    section: str, settings: LocalCheckpointSpec | MemoryCheckpointSpec, at: RuleContext, fixes: list[Fix]
) -> Iterator[Violation]:
    """Yield a violation if the checkpoints of a tier do not fit into its folder on this machine."""
    if not settings.interval or at.local_machine is None:
        return
    folder, size = expand_node_path(settings.path or ""), node_checkpoint_bytes(at.spec)
    if folder is None or size is None:
        return
    count = node_parts_at_once(at.spec, settings)
    free = at.local_machine.free_disk(folder)
    if free is None:
        return
    free += held_bytes(folder, f"{glob.escape(Path(at.spec.run.directory or '').name)}-{_DIGEST}")
    if count * size <= free:
        return
    copied = " with copies of another node's" if settings.replicate and int(at.spec.cluster.nodes) > 1 else ""
    yield Violation(
        f"{section}.path",
        f"a node's part of a checkpoint is {size / _GB:.3g} GB, and {folder} has {free / _GB:.3g} GB free: "
        f"{count} at a time{copied} are {count * size / _GB:.3g} GB",
        {"node_bytes": size, "checkpoints": count, "free_bytes": free},
        tuple(fixes),
        "warning",
    )


def _is_absolute(path: str) -> bool:
    """Return whether a path with variables, which the nodes replace, may be absolute."""
    return path.startswith(("/", "~", "$"))


def _device(path: Path) -> int | None:
    """Return the number of the file system of a path, or of its nearest existing parent."""
    for place in (path, *path.parents):
        try:
            return place.stat().st_dev
        except OSError:
            continue
    return None
