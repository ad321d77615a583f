"""How the ranks of a run agree about a checkpoint: small objects in memory, over a group on the CPU."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, cast

import torch.distributed as dist

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.hang_diagnostics import BESIDE
from megalaunch.engine.mesh import world_timeout

T = TypeVar("T")
_WRITING = datetime.timedelta(days=1)  # a disk takes its time, and a rank that dies is noticed at once


def coordination_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks (collective when first called), or None without a process group.

    Object collectives on a device's backend need device memory when it is scarcest.
    """
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    return _gloo_group(world)


@lru_cache(maxsize=1)
def _gloo_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    if dist.get_backend(world) == "gloo":
        return world
    group = dist.new_group(backend="gloo", timeout=world_timeout())
    assert isinstance(group, dist.ProcessGroup)
    return group


def background_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for a thread beside training; None without a process group. Collective."""
    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo", timeout=_WRITING, group_desc=BESIDE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rank_and_world() -> tuple[int, int]:
    """(rank, ranks); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Every rank's result of `work`, on every rank. Collective.

    A CheckpointError or OSError on any rank becomes the same CheckpointError on all of them.
    """
    result: T | CheckpointError
    try:
        result = work()
    except CheckpointError as error:
        result = error
    except OSError as error:
        result = CheckpointError(str(error))
    group = coordination_group()
    if group is None:
        results = [result]
    else:
        results = [result] * dist.get_world_size(group)
        dist.all_gather_object(results, result, group=group)
    for answer in results:
        if isinstance(answer, CheckpointError):
            raise answer
    return [answer for answer in results if not isinstance(answer, CheckpointError)]


def run_on_rank0(work: Callable[[], T]) -> T:
    """Rank 0's result of `work`, on every rank. Collective; errors as in `run_on_all_ranks`."""
    answers = run_on_all_ranks(lambda: work() if rank_and_world()[0] == 0 else None)
    return cast(T, answers[0])
