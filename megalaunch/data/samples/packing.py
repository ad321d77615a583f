"""Whole conversations laid side by side into rows of one length, with little left over."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Conversations packed together: enough for rows to be nearly full, few enough that the order stays random.
_WINDOW = 1024


def pack(lengths: Sequence[int] | NDArray[np.integer], capacity: int, order: NDArray[np.int64]) -> list[list[int]]:
    """Rows of conversations, as their numbers: each once, no row over `capacity` tokens.

    `order` is cut into windows; in each the longest is placed first, into the fullest row that has room (best
    fit decreasing). Lengths over `capacity` count as `capacity`.
    """
    rows: list[list[int]] = []
    for start in range(0, len(order), _WINDOW):
        window = order[start : start + _WINDOW].tolist()
        window.sort(key=lambda number: -min(int(lengths[number]), capacity))
        rows += _best_fit(window, lengths, capacity)
    return rows


def _best_fit(numbers: list[int], lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), in order
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
