"""Select the points of a sweep and their order: the full grid, or random points."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from random import Random

from megalaunch.config.search_space import Categorical, Range, Values

Axes = Mapping[str, Categorical | Range]
_REPEATS = 1000  # repeated draws in a row after which the space counts as exhausted


def grid(axes: Axes) -> Iterator[Values]:
    """Yield every point, the last axis fastest; raises ValueError when an axis is an interval."""
    columns = []
    for key, axis in axes.items():
        if isinstance(axis, Range):
            raise ValueError(f"{key} is an interval, of which a grid has no points")
        columns.append(axis.values)
    for row in itertools.product(*columns):
        yield dict(zip(axes, row, strict=True))


def random_points(axes: Axes, seed: int) -> Iterator[Values]:
    """Yield random points without repetition; the same for the same seed, so that a sweep can be continued."""
    random = Random(seed)
    seen: set[tuple[str, ...]] = set()
    repeats = 0
    while repeats < _REPEATS:
        row = tuple(axis.draw(random) for axis in axes.values())
        if row in seen:
            repeats += 1
            continue
        seen.add(row)
        repeats = 0
        yield dict(zip(axes, row, strict=True))
