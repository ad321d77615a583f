"""Counter-based normal random numbers: each depends on a key and its index only, so that any shard can be drawn alone.

The flat index is hashed in wrapping 32-bit integer arithmetic. The hash becomes a uniform number, and that a normal one
by the inverse of the normal distribution. Every operator is elementwise and gives the same bits at any offset in a
tensor, which `tests/engine/model/test_counter_rng.py` verifies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]
"""First index along a dim, and the number of indices."""

_BLOCK = 1 << 16  # numbers per block: intermediates stay in the CPU's cache
_LARGEST = 1 - 2**-24  # the largest fp32 number below 1: a draw is at most 5.42 standard deviations away


def fill_normal(out: Tensor, part: Sequence[Range], shape: Sequence[int], key: str, std: float) -> None:
    """Fill `out` with its part of the normal random tensor that `key` defines.

    The numbers are drawn on the CPU in fp32, so that every device and dtype gets the same ones.

    Args:
        out: The tensor to fill, on any device and in any dtype.
        part: The range of the global tensor that `out` is, for each dim.
        shape: The shape of the global tensor.
        key: Identifies the random tensor, such as seed and parameter name.
        std: The standard deviation.
    """
    if out.numel() == 0:
        return
    keys = _Keys.of(key)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    (first, rows), *rest = part
    columns = torch.zeros((), dtype=torch.int64)
    for (start, count), stride in zip(rest, strides[1:], strict=True):
        columns = columns[..., None] + torch.arange(start, start + count) * stride
    starts = (torch.arange(first, first + rows) * strides[0]).view(-1, *[1] * columns.dim())
    # Index times an odd number: the lower 32 bits of a 64-bit product are right even if it wraps.
    row_words, column_words = ((numbers * keys.step).to(torch.int32) for numbers in (starts, columns))
    at_once = max(1, _BLOCK // max(1, columns.numel()))
    for row in range(0, rows, at_once):
        block = slice(row, min(row + at_once, rows))
        seeds = row_words[block] + column_words
        if math.prod(shape) > 2**32:
            higher = ((starts[block] + columns) >> 32).to(torch.int32)
            seeds.bitwise_xor_(_mix(higher.add_(keys.higher)))
        out[block].copy_(_normal(seeds.add_(keys.start)).mul_(math.sqrt(2) * std))


class _Keys(NamedTuple):
    """32-bit hashes of a key: the counter's start, its odd step, and one that is mixed in for indices past 32 bits."""

    start: int
    step: int
    higher: int

    @classmethod
    def of(cls, key: str) -> _Keys:
        digest = hashlib.sha256(key.encode()).digest()
        start, step, higher = (int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4, 8))
        return cls(start, step | 1, higher)


def _normal(seeds: Tensor) -> Tensor:
    """Return normal numbers of variance 1/2 for these hashes, which are overwritten."""
    uniform = _mix(seeds).float().mul_(2**-31).clamp_(-_LARGEST, _LARGEST)
    return uniform.erfinv_()


def _mix(seeds: Tensor) -> Tensor:
    """Apply MurmurHash3's finalizer (Appleby) in place: each output bit depends on every input bit."""
    spare = torch.empty_like(seeds)
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, 1)):
        torch.bitwise_right_shift(seeds, shift, out=spare)
        seeds.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            seeds.mul_(factor)
    return seeds
