"""Memory shared between forked workers and their parent: workers write tokens to it instead of sending them by pipe."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.preprocess.encode_chunk import Encoded


class SharedBuffers:
    """`count` slots of `size` bytes; a chunk's tokens occupy one until `free`, when they are written to the file."""

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, count * size)  # untouched pages take no memory
        self._free = list(range(count))

    def take(self) -> int:
        """Return a free slot."""
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Release a slot."""
        self._free.append(slot)

    def write(self, slot: int, encoded: Encoded, dtype: np.dtype[Any]) -> list[int] | None:
        """In a worker: write the tokens of each key as `dtype` and return their numbers; None if they do not fit."""
        sizes = [key.tokens.size for key in encoded.keys]
        if sum(sizes) * dtype.itemsize > self._size:
            return None
        start = slot * self._size
        for key, size in zip(encoded.keys, sizes, strict=True):
            self._view(start, size, dtype)[:] = key.tokens
            start += size * dtype.itemsize
        encoded.keys = [replace(key, tokens=np.empty(0, dtype)) for key in encoded.keys]
        return sizes

    def read(self, slot: int, encoded: Encoded, sizes: Sequence[int]) -> None:
        """In the parent: give each key a view of its tokens in the slot."""
        start = slot * self._size
        for number, (key, size) in enumerate(zip(encoded.keys, sizes, strict=True)):
            tokens = self._view(start, size, key.tokens.dtype)
            encoded.keys[number] = replace(key, tokens=tokens)
            start += tokens.nbytes

    def _view(self, start: int, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(self._memory, dtype, size, start)
