"""Functional collectives along one mesh axis: they return new tensors, and are the identity on an axis of size 1.

The operators of `_c10d_functional` have the same names in every supported torch. An `_async` function returns at once,
so that a matmul overlaps with the communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megalaunch.engine.mesh import Axis
from megalaunch.engine.torch_private import FUNCTIONAL_COLLECTIVES
from megalaunch.kernels.forms import on_cpu

_OPS = FUNCTIONAL_COLLECTIVES


@dataclass(frozen=True)
class AsyncCollective:
    """A collective in flight. Call `wait` exactly once: it returns the result."""

    in_flight: Tensor
    finish: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """Wait for the collective and return its result."""
        return self.finish(_OPS.wait_tensor(self.in_flight))


def all_gather_async(x: Tensor, dim: int, axis: Axis) -> AsyncCollective:
    """All-gather: concatenate the ranks' shards along `dim`, in rank order."""
    if axis.size == 1:
        return _completed(x)
    joined = _all_gather_rows(x.contiguous(), axis)
    if dim == 0:
        return AsyncCollective(joined, _identity)
    return AsyncCollective(joined, lambda gathered: torch.cat(gathered.chunk(axis.size, dim=0), dim=dim))


def reduce_scatter_async(x: Tensor, dim: int, axis: Axis) -> AsyncCollective:
    """Reduce-scatter: sum over ranks and return this rank's shard along `dim`, whose size the axis divides."""
    if axis.size == 1:
        return _completed(x)
    parts = x if dim == 0 else torch.cat(x.chunk(axis.size, dim=dim), dim=0)
    if on_cpu(x):
        # gloo's own reduce-scatter sends the whole tensor to every rank (figures: parallel/fsdp.py).
        parts_of_ranks = all_to_all_async(parts, axis)
        return AsyncCollective(
            parts_of_ranks.in_flight, lambda received: received.view(axis.size, -1, *parts.shape[1:]).sum(0)
        )
    return AsyncCollective(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group), _identity)


def all_to_all_async(x: Tensor, axis: Axis) -> AsyncCollective:
    """All-to-all of equal parts along dim 0: part i goes to rank i; the result has one part of each rank, in order."""
    splits = [x.shape[0] // axis.size] * axis.size
    return all_to_all_v_async(x, splits, splits, axis)


def all_to_all_v_async(
    x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], axis: Axis
) -> AsyncCollective:
    """All-to-all of uneven parts: send `input_splits[i]` rows to rank i, receive `output_splits[i]` rows from it."""
    if axis.size == 1:
        return _completed(x)
    return AsyncCollective(
        _OPS.all_to_all_single(x.contiguous(), list(output_splits), list(input_splits), axis.group), _identity
    )


def ring_shift_async(x: Tensor, axis: Axis, step: Literal[1, -1] = 1) -> AsyncCollective:
    """Send `x` to the rank `step` further round the ring, and return what the rank `step` before this one sent."""
    rows = x.shape[0]
    input_splits = [rows if rank == (axis.rank + step) % axis.size else 0 for rank in range(axis.size)]
    output_splits = [rows if rank == (axis.rank - step) % axis.size else 0 for rank in range(axis.size)]
    return all_to_all_v_async(x, input_splits, output_splits, axis)


def all_reduce_async(x: Tensor, axis: Axis) -> AsyncCollective:
    """All-reduce: return the sum over ranks on every rank."""
    return (
        _completed(x)
        if axis.size == 1
        else AsyncCollective(_OPS.all_reduce(x.contiguous(), "sum", axis.group), _identity)
    )


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce: return the elementwise maximum over ranks, and wait for it."""
    return x if axis.size == 1 else _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "max", axis.group))


def _all_gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """Start an all-gather along dim 0.

    gloo runs the collectives of a group on two threads, and both write the name of the last operation into one string
    without a lock (torch 2.13). The name of the usual all-gather is so long that it is allocated on the heap; with a
    second collective in flight the heap is corrupted about once in 100,000 times. The `_out` variant has a name that
    fits into the string itself.
    """
    if not on_cpu(x):
        return _OPS.all_gather_into_tensor(x, axis.size, axis.group)
    joined = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return _OPS.all_gather_into_tensor_out(x, axis.size, axis.group, out=joined)


def _completed(x: Tensor) -> AsyncCollective:
    return _Completed(x, _identity)


class _Completed(AsyncCollective):
    def wait(self) -> Tensor:
        return self.in_flight


def _identity(x: Tensor) -> Tensor:
    return x
