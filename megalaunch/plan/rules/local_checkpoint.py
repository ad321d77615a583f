"""Rules of local checkpoints: their folder, their interval, and the disk of a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megalaunch.plan.rules.host_resources import checkpoint_bytes
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.world import replicas_and_shards

_GB = 1e9

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


@rule("checkpoint.local_path", "With checkpoint.local.interval, checkpoint.local.path is an absolute path.")
def local_path(at: RuleContext) -> Iterator[Violation]:
    """It names a folder on a disk of each node. A relative path is below the working directory, which nodes share."""
    local = at.spec.checkpoint.local
    if local.interval > 0 and (local.path is None or not local.path.startswith(("/", "~", "$"))):
        named = "no folder is named" if local.path is None else f"{local.path} is not an absolute path"
        yield Violation(
            "checkpoint.local.path",
            f"{named}: local checkpoints need checkpoint.local.path=PATH on a disk of each node",
            fixes=({"checkpoint.local.interval": 0, "checkpoint.local.path": None},),
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
    folder, directory = _local_folder(at), at.spec.run.directory
    if folder is None or directory is None or at.machine is None or int(at.spec.cluster.nodes) < 2:
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
    folder, size, local = _local_folder(at), _node_bytes(at), at.spec.checkpoint.local
    if folder is None or size is None or at.local_machine is None:
        return
    free = at.local_machine.free_disk(folder)
    copies = 2 if local.replicate and int(at.spec.cluster.nodes) > 1 else 1
    if free is None:
        return
    free += _existing_bytes(at, folder)
    count = copies * (local.keep + 1)
    if count * size <= free:
        return
    copied = " with the copy of another node's" if copies > 1 else ""
    fixes: list[Fix] = [{"checkpoint.local.keep": 1}, {"checkpoint.local.keep": 1, "checkpoint.local.replicate": False}]
    yield Violation(
        "checkpoint.local.path",
        f"a node's part of a local checkpoint is {size / _GB:.3g} GB, and {folder} has {free / _GB:.3g} GB free: "
        f"{local.keep + 1} at a time{copied} are {count * size / _GB:.3g} GB",
        {"node_bytes": size, "checkpoints": count, "free_bytes": free},
        (*fixes, {"checkpoint.local.interval": 0, "checkpoint.local.path": None}),
        "warning",
    )


def _local_folder(at: RuleContext) -> Path | None:
    """Return checkpoint.local.path on this machine; None without local checkpoints, or with an unknown variable."""
    local = at.spec.checkpoint.local
    path = os.path.expandvars(local.path or "")
    return Path(path).expanduser() if local.interval > 0 and path and "$" not in path else None


def _device(path: Path) -> int | None:
    """Return the number of the file system of a path, or of its nearest existing parent."""
    for place in (path, *path.parents):
        try:
            return place.stat().st_dev
        except OSError:
            continue
    return None


def _node_bytes(at: RuleContext) -> int | None:
    """Return the bytes of the shards of a node's ranks: replicas save what they hold."""
    size = checkpoint_bytes(at)
    if size is None or at.dp is None or at.world is None:
        return None
    replicas, _ = replicas_and_shards(at.dp, at.spec.parallel)
    return size * replicas // int(at.spec.cluster.nodes)


def _existing_bytes(at: RuleContext, folder: Path) -> int:
    """Return the bytes of the run's existing local checkpoints, which newer ones replace."""
    name = Path(at.spec.run.directory or "").name
    try:
        return sum(file.stat().st_size for file in folder.glob(f"{name}-*/rank_*/step_*/*"))
    except (OSError, ValueError):
        return 0
