"""The key/value cache: what every layer remembers of the positions it has seen.

One contiguous block a layer, of a size known from the start, so that a step copies nothing but its own keys.
"""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """Keys and values of one layer, [B, G, capacity, D]; `length` positions of them are filled.

    Memory is taken with the first keys, in their format and on their device.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, G, S, D] of the next positions; returns views of all positions so far, [B, G, T, D].

        Raises ValueError when they do not fit.
        """
        end = self.length + keys.shape[2]
        if end > self._capacity:
            raise ValueError(f"the cache holds {self._capacity} positions, {end} are asked for")
        if self._keys is None or self._values is None:
            batch, groups, _, head_dim = keys.shape
            self._keys, self._values = (keys.new_empty(batch, groups, self._capacity, head_dim) for _ in range(2))
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


def make_cache(num_layers: int, capacity: int) -> list[LayerCache]:
    """An empty cache for sequences of up to `capacity` tokens, one entry a layer."""
    return [LayerCache(capacity) for _ in range(num_layers)]
