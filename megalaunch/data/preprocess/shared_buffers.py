"""Memory that forked workers share with their parent: tokens are left in it, instead of being sent through a pipe."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.preprocess.encode_chunk import Encoded


class SharedBuffers:
    """`count` places of `size` bytes; a chunk's tokens lie in one until `free` says that they are written."""

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, count * size)  # pages that are never touched take no memory
        self._free = list(range(count))

    def take(self) -> int:
        """A place that nothing lies in."""
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Give a place back."""
        self._free.append(slot)

    def write(self, slot: int, encoded: Encoded, dtype: np.dtype[Any]) -> list[int] | None:
        """In a worker: put the tokens of each key there as `dtype`, and how many they are; None: they are too many."""
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
        """In the parent: give each key its tokens, which stay where they lie."""
        start = slot * self._size
        for number, (key, size) in enumerate(zip(encoded.keys, sizes, strict=True)):
            tokens = self._view(start, size, key.tokens.dtype)
            encoded.keys[number] = replace(key, tokens=tokens)
            start += tokens.nbytes

    def _view(self, start: int, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(self._memory, dtype, size, start)
