"""The note of an amax as an operator of torch, so that compiled layers record theirs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("megalaunch::record_amax", mutates_args=())
def record_amax(noted_m3: Tensor, operand: int, amax: Tensor, value: Tensor) -> Tensor:
    """Raise the noted amaxes of an operand to `amax`, and return a copy of `value`, which the caller computes with.

    To a compiler this is a function of its arguments: a graph refuses to change a tensor in its backward pass that its
    forward pass changes too. Nothing reads the amaxes before the step ends, and a maximum is the same if a graph
    computes it twice or in another order. The copy keeps the call: without a reader a graph would drop it.
    """
    raise_amax(noted_m3, operand, amax)
    return value.clone()


@record_amax.register_fake
def _(noted_m3: Tensor, operand: int, amax: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


def raise_amax(noted_m3: Tensor, operand: int, amax: Tensor) -> None:
    """Raise the noted amaxes of an operand to those of `amax`, in place.

    `data` counts its changes apart: a backward pass still takes the tensor that its forward pass saved.
    """
    noted = noted_m3.data[:, operand]
    torch.maximum(noted, amax.flatten(), out=noted)
