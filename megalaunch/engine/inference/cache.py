"""The key/value cache: what every layer remembers of the positions it has seen.

One contiguous block a layer, of a size known from the start, so that a step copies nothing but its own keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.engine.model.decoder import DecoderConfig


class LayerCache:
    """Keys and values of one layer, [B, G, capacity, D]; `length` positions of them are filled."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, G, S, D] of the next positions; returns views of all positions so far, [B, G, T, D].

        Raises ValueError when they do not fit.
        """
        end = self.length + keys.shape[2]
        if end > self._keys.shape[2]:
            raise ValueError(f"the cache holds {self._keys.shape[2]} positions, {end} are asked for")
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


def make_cache(
    config: DecoderConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """An empty cache for `batch` sequences of up to `capacity` tokens, one entry a layer."""
    shape = (batch, config.num_groups, capacity, config.head_dim)
    return [LayerCache(shape, dtype, device) for _ in range(config.num_layers)]
