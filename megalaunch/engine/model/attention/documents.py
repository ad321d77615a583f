"""The lengths of packed documents, read from document ids: attention and partitions are planned on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor


def document_lengths(documents_BS: Tensor) -> tuple[int, ...]:
    """Return the lengths of the documents, row after row; a document is a run of equal ids in a row."""
    rows = documents_BS.cpu().numpy()
    ends = [np.flatnonzero(np.diff(row, append=row[-1] + 1)) + 1 for row in rows]
    return tuple(int(length) for row in ends for length in np.diff(row, prepend=0))


DocumentLengths = Callable[[Tensor], tuple[int, ...]]
"""Takes document ids [B, S]; returns the lengths of the documents, as `document_lengths` does."""


def documents_by_row(documents_BS: Tensor, lengths: DocumentLengths) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the documents of each row."""
    found: list[list[int]] = []
    room = 0
    for length in lengths(documents_BS):
        if not room:
            found.append([])
            room = documents_BS.shape[1]
        found[-1].append(length)
        room -= length
    return tuple(map(tuple, found))
