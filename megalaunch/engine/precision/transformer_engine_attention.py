"""Attention of Transformer Engine in fp8: a layer of its own for each decoder layer, which keeps delayed scales.

Transformer Engine casts queries, keys and values, weights and outputs, and their gradients, each by a scale from the
histories that the layer keeps; its inputs and outputs stay in 16 bits (`fp8_dpa` of its recipe).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalaunch.engine.precision.transformer_engine import BACKWARD, FORWARD, Autocast

_MATMULS = 3  # that Transformer Engine counts in attention: with as many places for tensors as in 3 linear layers

TENSORS = {FORWARD: 3 * _MATMULS, BACKWARD: 2 * _MATMULS}
"""How many scales and histories there are in each direction; not all of the places are used."""

Scales = Mapping[str, Sequence[Tensor]]
"""By direction: scales and histories, as Transformer Engine gives and takes them."""


class Float8Attention:
    """The layer `DotProductAttention` of one decoder layer, with its scales and histories.

    The layer is made in the first pass, which knows the heads of this rank; until then its state is kept here.

    Args:
        autocast: The contexts in which it computes.
        entries: The length of the histories.
        device: Where they are.
    """

    def __init__(self, autocast: Autocast, entries: int, device: torch.device) -> None:
        self._autocast = autocast
        self._layer: Any = None
        self._state: Scales = {
            direction: (torch.ones(count, device=device), torch.zeros(entries, count, device=device))
            for direction, count in TENSORS.items()
        }

    def layer(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the layer, which is about to compute; `make` makes it, in an autocast."""
        if self._layer is None:
            self._layer = make()
            self._layer.init_fp8_metadata(num_gemms=_MATMULS)
            self._layer.reset_fp8_meta_tensors(self._state)
        self._autocast.note_scales(self)
        made: nn.Module = self._layer
        return made

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """Do nothing: there is a state from the beginning."""

    def get_fp8_meta_tensors(self) -> Scales:
        """Return copies of scales and histories, as a layer of Transformer Engine."""
        if self._layer is None:
            return {direction: [each.clone() for each in pair] for direction, pair in self._state.items()}
        state: Scales = self._layer.get_fp8_meta_tensors()
        return state

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Scales) -> None:
        """Set scales and histories, as a layer of Transformer Engine."""
        if self._layer is None:
            self._state = {direction: [each.clone() for each in pair] for direction, pair in fp8_meta_tensors.items()}
        else:
            self._layer.reset_fp8_meta_tensors(fp8_meta_tensors)
