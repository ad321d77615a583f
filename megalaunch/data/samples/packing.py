"""Sequence packing: whole conversations placed in rows of a fixed length with little padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Conversations packed at a time: enough that rows are nearly full, few enough that the order stays random.
_WINDOW = 1024


def pack(lengths: Sequence[int] | NDArray[np.integer], capacity: int, order: NDArray[np.int64]) -> list[list[int]]:
    """Pack conversations into rows by best-fit decreasing, within windows of `order`.

    Args:
        lengths: tokens of each conversation; longer ones count as `capacity`.
        capacity: tokens of a row.
        order: numbers of the conversations to pack. In each window of 1,024 the longest is placed first, in the
            fullest row that has room.

    Returns:
        The conversation numbers of each row; each number appears once, and no row exceeds `capacity` tokens.
    """
    rows: list[list[int]] = []
    for start in range(0, len(order), _WINDOW):
        window = order[start : start + _WINDOW].tolist()
        window.sort(key=lambda number: -min(int(lengths[number]), capacity))
        rows += _best_fit(window, lengths, capacity)
    return rows


def _best_fit(numbers: list[int], lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Pack `numbers`, longest first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for number in numbers:
        length = min(int(lengths[number]), capacity)
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, row = free.pop(place)
            rows[row].append(number)
        else:
            room, row = capacity, len(rows)
            rows.append([number])
        insort(free, (room - length, row))
    return rows
