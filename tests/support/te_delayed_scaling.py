"""What the stand-in for Transformer Engine does for delayed scaling: when histories get entries, and how scales follow.

As Transformer Engine's `FP8GlobalStateManager`: where the outermost autocast ends all layers that have computed get an
entry of input and weight, and where the backward of the first layer in an autocast ends one of the gradient. An inner
autocast that ends makes the next layer a first one again. Passes without gradients note amaxes and make no entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.precision.float8 import GRADIENT, INPUT, WEIGHT

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
TENSORS = {FORWARD: 3, BACKWARD: 2}
"""Of each matmul: input, weight, output; gradients of output and input."""


@dataclass
class Tensors:
    """Scales and histories of a layer in one direction; entry 0 is the one being made."""

    scale: Tensor
    amax_history: Tensor


@dataclass
class Manager:
    """The autocasts that are open, and the layers that have computed, with the group of their autocast."""

    depth: int = 0
    is_first: bool = False
    group: Any = None
    registered: list[tuple[Any, dict[str, Tensors], Any]] = field(default_factory=list)
    entries: int = 0

    def register(self, recipe: Any, meta: dict[str, Tensors]) -> None:
        if not any(known is meta for _, known, _ in self.registered):
            self.registered.append((recipe, meta, self.group))

    def take_first(self) -> bool:
        """Whether this is the first layer of an autocast."""
        first, self.is_first = self.is_first, False
        return first

    @torch.no_grad()
    def make_entries(self, direction: str) -> None:
        if not self.registered:
            return
        self.entries += direction == FORWARD
        group = self.registered[0][2]
        amaxes = torch.cat([meta[direction].amax_history[0] for _, meta, _ in self.registered])
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)
        sizes = [meta[direction].scale.numel() for _, meta, _ in self.registered]
        for (recipe, meta, _), amax in zip(self.registered, amaxes.split(sizes), strict=True):
            _update(meta[direction], amax, recipe.largest(direction == FORWARD), recipe.margin)


def _update(tensors: Tensors, amax: Tensor, largest: float, margin: int) -> None:
    history = tensors.amax_history
    history[0] = amax
    amax = history.max(0).values
    scale = largest / amax / 2**margin
    scale = torch.where((amax > 0) & amax.isfinite(), scale, tensors.scale)
    tensors.scale.copy_(scale.clamp(max=torch.finfo(torch.float32).max))
    history.copy_(history.roll(-1, 0))
    history[0] = 0


class Scales:
    """The scales of one matmul in a call (`LayerAmax`): those of input and weight are of the time of their cast."""

    has_scales = True

    def __init__(self, meta: dict[str, Tensors], matmul: int, weight_scale: Tensor) -> None:
        self._meta, self._matmul = meta, matmul
        self._frozen = {INPUT.index: meta[FORWARD].scale[3 * matmul].clone(), WEIGHT.index: weight_scale}
        self.is_backward = False

    def scale(self, operand: int) -> Tensor:
        live = self._meta[BACKWARD].scale[2 * self._matmul]
        return self._frozen.get(operand, live).clone().view(1, 1)

    def record(self, operand: int, amax: Tensor, value: Tensor) -> Tensor:
        if operand == GRADIENT.index:
            _note(self._meta[BACKWARD], 2 * self._matmul, amax)
        elif operand == INPUT.index and not self.is_backward:
            _note(self._meta[FORWARD], 3 * self._matmul, amax)
        return value


def cast_weight(meta: dict[str, Tensors], matmul: int, weight: Tensor) -> Tensor:
    """Note the amax of a weight that is cast; return its scale."""
    _note(meta[FORWARD], 3 * matmul + 1, weight.detach().abs().amax())
    return meta[FORWARD].scale[3 * matmul + 1].clone()


def _note(tensors: Tensors, place: int, amax: Tensor) -> None:
    tensors.amax_history[0, place] = torch.maximum(tensors.amax_history[0, place], amax.max())
