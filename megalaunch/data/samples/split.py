"""Training, validation and test split of a token file's sequences, by Megatron's split string."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from megalaunch.data.errors import DataError

# Megatron's default for a data path without a split: training, validation, test.
DEFAULT_SPLIT = "969, 30, 1"


def split_ranges(split: str, count: int) -> tuple[range, range, range]:
    """Split `count` sequences into training, validation and test ranges; empty where the fraction is 0.

    As in Megatron: fractions normalised in float64, boundaries rounded half to even.
    """
    borders = [0.0, *np.cumsum(split_shares(split)).tolist()]
    begin, first, second, end = (round(border * count) for border in borders)
    return range(begin, first), range(first, second), range(second, end)


def split_shares(split: str) -> list[float]:
    """Parse a split into the fractions of training, validation and test, which sum to 1.

    Raises:
        DataError: the text has no number above 0.
    """
    numbers = [float(number) for number in re.findall(r"\.\d+|\d+(?:\.\d*)?", split)]
    shares = np.array((numbers + [0.0] * 3)[:3])
    if shares.sum() == 0:
        raise DataError(f"data.split={split} has no fraction above 0", fix=f"Write it as `{DEFAULT_SPLIT}`.")
    return [float(share) for share in shares / shares.sum()]


def training_and_validation(
    train_prefix: Path, validation_prefix: Path | None, count: int, split: str | None = None
) -> tuple[range, range]:
    """Return the ranges of the `count` sequences of `train_prefix` for training and for validation.

    If both prefixes are the same file, it is split by `split` (None: Megatron's default); otherwise all sequences are
    for training.
    """
    if validation_prefix == train_prefix:
        training, validation, _ = split_ranges(split or DEFAULT_SPLIT, count)
        return training, validation
    return range(count), range(0)
