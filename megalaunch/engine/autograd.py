"""Typed calls of autograd functions: torch's own `Function.apply` has no types."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply_function(function: type[Function], *inputs: Any) -> Tensor:
    """Call an autograd function that returns one tensor."""
    output: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


def apply_tuple_function(function: type[Function], *inputs: Any) -> tuple[Tensor, ...]:
    """Call an autograd function that returns a tuple of tensors."""
    outputs: tuple[Tensor, ...] = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return outputs
