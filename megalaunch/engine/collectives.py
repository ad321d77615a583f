"""Collectives along one mesh axis: they return new tensors, and are the identity on an axis of size 1.

The operators of `_c10d_functional` carry the same names in every torch that is supported. Each `start_` function
returns at once, so that a matmul can run beside the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalaunch.engine.mesh import Axis

_OPS = torch.ops._c10d_functional


@dataclass(frozen=True)
class AsyncCollective:
    """An exchange under way; `wait` returns its result, and is called once."""

    sent: Tensor
    finish: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """The result, once it is there."""
        return self.finish(_OPS.wait_tensor(self.sent))


def all_gather_async(x: Tensor, dim: int, axis: Axis) -> AsyncCollective:
    """The ranks' parts, joined along `dim` in rank order."""
    if axis.size == 1:
        return _completed(x)
    joined = _all_gather_rows(x.contiguous(), axis)
    if dim == 0:
        return AsyncCollective(joined, _identity)
    return AsyncCollective(joined, lambda whole: torch.cat(whole.chunk(axis.size, dim=0), dim=dim))


def start_reduce_scatter(x: Tensor, dim: int, axis: Axis) -> AsyncCollective:
    """This rank's part along `dim` of the sum over ranks; `dim` divides by the axis."""
    if axis.size == 1:
        return _completed(x)
    parts = x if dim == 0 else torch.cat(x.chunk(axis.size, dim=dim), dim=0)
    if x.is_cpu:  # gloo's own reduce-scatter sends everything to everyone (engine/parallel/gloo_reduce_scatter.py has the figures)
        exchanged = all_to_all_async(parts, axis)
        return AsyncCollective(exchanged.sent, lambda found: found.view(axis.size, -1, *parts.shape[1:]).sum(0))
    return AsyncCollective(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group), _identity)


def all_to_all_async(x: Tensor, axis: Axis) -> AsyncCollective:
    """The i-th of equal parts along dim 0 goes to rank i; the result holds one part of each rank, in rank order."""
    splits = [x.shape[0] // axis.size] * axis.size
    return all_to_all_v_async(x, splits, splits, axis)


def all_to_all_v_async(x: Tensor, to: Sequence[int], found: Sequence[int], axis: Axis) -> AsyncCollective:
    """Rows of `x`, so many to each rank in rank order; the result holds `found` rows of each."""
    if axis.size == 1:
        return _completed(x)
    return AsyncCollective(_OPS.all_to_all_single(x.contiguous(), list(found), list(to), axis.group), _identity)


def ring_shift_async(x: Tensor, axis: Axis) -> AsyncCollective:
    """What the rank before this one has; the first gets the last one's."""
    rows = x.shape[0]
    to = [rows if rank == (axis.rank + 1) % axis.size else 0 for rank in range(axis.size)]
    found = [rows if rank == (axis.rank - 1) % axis.size else 0 for rank in range(axis.size)]
    return all_to_all_v_async(x, to, found, axis)


def all_reduce_async(x: Tensor, axis: Axis) -> AsyncCollective:
    """The sum over ranks, on every rank."""
    return (
        _completed(x)
        if axis.size == 1
        else AsyncCollective(_OPS.all_reduce(x.contiguous(), "sum", axis.group), _identity)
    )


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """The largest of the ranks' values, elementwise."""
    return x if axis.size == 1 else _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "max", axis.group))


def _all_gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """The gather under way, along dim 0.

    Gloo serves a group by two threads, which write the name of what they did into one string without a lock (torch
    2.13). The usual gather's name is so long that it lies on the heap, and beside another exchange the heap breaks,
    once in some 100,000 times. This gather does the same under a name that fits into the string itself.
    """
    if not x.is_cpu:
        return _OPS.all_gather_into_tensor(x, axis.size, axis.group)
    joined = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return _OPS.all_gather_into_tensor_out(x, axis.size, axis.group, out=joined)


def _completed(x: Tensor) -> AsyncCollective:
    return _Completed(x, _identity)


class _Completed(AsyncCollective):
    def wait(self) -> Tensor:
        return self.sent


def _identity(x: Tensor) -> Tensor:
    return x
