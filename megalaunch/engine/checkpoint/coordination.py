"""Coordination of the ranks of a save or load: object collectives over a gloo group on the CPU."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from megalaunch.engine.checkpoint.errors import CheckpointError, storage_error
from megalaunch.engine.hang_dump import CHECKPOINT_GROUP
from megalaunch.engine.mesh import world_timeout

T = TypeVar("T")
_WRITING = datetime.timedelta(days=1)  # a disk may be slow; a rank that dies is detected at once


def coordination_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks, or None without a process group. Collective on the first call.

    Object collectives over the device's backend would need device memory, which may be nearly full during a save.
    """
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    return world if dist.get_backend(world) == "gloo" else _separate_gloo_group(world)


@lru_cache(maxsize=1)
def _separate_gloo_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=world_timeout())
    assert isinstance(group, dist.ProcessGroup)
    return group


def background_group() -> dist.ProcessGroup | None:
    """Create a gloo group of all ranks for the async save threads; None without a process group. Collective.

    The main thread and the save thread run collectives at the same time: on one group their order would differ by rank.
    """
    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo", timeout=_WRITING, group_desc=CHECKPOINT_GROUP)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_objects(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """All-gather one small object per rank over a gloo group, in rank order. Without a group there is one rank."""
    if group is None:
        return [mine]
    gathered = [mine] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all ranks' results, in rank order. Collective (all-gather of objects).

    A CheckpointError or OSError on any rank raises the same CheckpointError on all ranks.
    """
    result: T | CheckpointError
    try:
        result = work()
    except CheckpointError as error:
        result = error
    except OSError as error:
        result = storage_error(str(error), Path(error.filename or ""), error)
    results = gather_objects(result, coordination_group())
    for answer in results:
        if isinstance(answer, CheckpointError):
            raise answer
    return [answer for answer in results if not isinstance(answer, CheckpointError)]


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank. Collective; errors as in `run_on_all_ranks`."""
    answers = run_on_all_ranks(lambda: work() if rank_and_world()[0] == 0 else None)
    return cast(T, answers[0])
