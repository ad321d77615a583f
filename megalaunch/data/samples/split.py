"""Which sequences of a file are for training and which for validation, by Megatron's split string."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from megalaunch.data.errors import DataError

# Megatron's own default where a data path is given without a split: training, validation, test.
DEFAULT_SPLIT = "969, 30, 1"


def split_ranges(split: str, count: int) -> tuple[range, range, range]:
    """The training, validation and test part of `count` sequences; an empty range where a part has none.

    Follows Megatron: shares normalised in float64, borders rounded half to even.
    """
    borders = [0.0, *np.cumsum(split_shares(split)).tolist()]
    begin, first, second, end = (round(border * count) for border in borders)
    return range(begin, first), range(first, second), range(second, end)


def split_shares(split: str) -> list[float]:
    """The shares of training, validation and test, which sum to 1. DataError for a text without a number above 0."""
    numbers = [float(number) for number in re.findall(r"\.\d+|\d+(?:\.\d*)?", split)]
    shares = np.array((numbers + [0.0] * 3)[:3])
    if shares.sum() == 0:
        raise DataError(f"data.split={split} names no part above 0", fix=f"Write it as `{DEFAULT_SPLIT}`.")
    return [float(share) for share in shares / shares.sum()]


def training_and_validation(
    train_prefix: Path, validation_prefix: Path | None, count: int, split: str | None = None
) -> tuple[range, range]:
    """The parts of the `count` sequences under `train_prefix` to train on and to validate on.

    Where both prefixes are the same file, `split` (None: Megatron's default) shares it out; else all of it is for
    training.
    """
    if validation_prefix == train_prefix:
        training, validation, _ = split_ranges(split or DEFAULT_SPLIT, count)
        return training, validation
    return range(count), range(0)
