"""Normal numbers by counter: each is a function of a key and its place in a tensor, so that any part is drawn alone.

A place is hashed by 32-bit integer arithmetic that wraps, the word becomes a uniform number and that a normal one by
the inverse of the normal distribution. Every operator works on single numbers and gives the same bits wherever in a
tensor they stand, which `tests/unit/test_draws.py` holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]
"""First index along a dimension, and how many."""

_BLOCK = 1 << 16  # numbers at a time: what they pass through stays in a processor's cache
_LARGEST = 1 - 2**-24  # the largest fp32 number below 1: a draw is at most 5.42 standard deviations away


def fill_normal(out: Tensor, part: Sequence[Range], shape: Sequence[int], key: str, std: float) -> None:
    """Fill `out` with its part of a tensor of `shape`; `part` is a range for each dimension.

    Drawn on the processor in fp32, so that every device and format has the same numbers.
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
    # A place times an odd number: 64-bit products keep their lower half right when they wrap.
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
    """Words of a key: where counting starts, the odd number it goes in steps of, and one for places past 32 bits."""

    start: int
    step: int
    higher: int

    @classmethod
    def of(cls, key: str) -> _Keys:
        digest = hashlib.sha256(key.encode()).digest()
        start, step, higher = (int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4, 8))
        return cls(start, step | 1, higher)


def _normal(seeds: Tensor) -> Tensor:
    """Normal numbers of variance 1/2 by words, which are used up."""
    uniform = _mix(seeds).float().mul_(2**-31).clamp_(-_LARGEST, _LARGEST)
    return uniform.erfinv_()


def _mix(seeds: Tensor) -> Tensor:
    """In place, MurmurHash3's last step (Appleby): every bit of the result depends on every bit of the word."""
    spare = torch.empty_like(seeds)
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, 1)):
        torch.bitwise_right_shift(seeds, shift, out=spare)
        seeds.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            seeds.mul_(factor)
    return seeds
