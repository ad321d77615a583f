"""A differentiable collective in two calls, so that compute between them overlaps with it, in backward as in forward.

Forward:   start -> compute -> finish
Backward:  finish' starts the transposed collective -> the backward of the compute -> start' waits for it

Autograd runs the nodes that are ready in the reverse order of their creation: the backward of what was called between
`start` and `finish` runs between the backward of `finish` and that of `start`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import AsyncCollective

StartCollective = Callable[[Tensor], AsyncCollective]


class OverlappedCollective:
    """One call of a collective, started when this object is made; call `finish` exactly once."""

    def __init__(self, x: Tensor, forward: StartCollective, backward: StartCollective) -> None:
        """Start the collective `forward` of `x`; `backward` starts its transpose."""
        self.forward, self.backward = forward, backward
        self.in_flight: AsyncCollective | None = None
        self._token: Tensor | None = apply_function(_Start, x, self)

    def finish(self) -> Tensor:
        """Wait for the collective and return its result."""
        token, self._token = self._token, None  # its graph refers to this object: a cycle would hold both
        return apply_function(_Finish, token, self)

    def wait(self) -> Tensor:
        """Wait for what is in flight: the collective, or in backward its transpose."""
        assert self.in_flight is not None, "nothing was started"
        in_flight, self.in_flight = self.in_flight, None
        return in_flight.wait()


class _Start(torch.autograd.Function):
    """Forward: start the collective, and return a token for its result. Backward: wait for the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: OverlappedCollective) -> Tensor:
        ctx.call = call
        call.in_flight = call.forward(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.call.wait(), None


class _Finish(torch.autograd.Function):
    """Forward: wait for the collective. Backward: start its transpose."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: OverlappedCollective) -> Tensor:
        ctx.call = call
        return call.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call.in_flight = ctx.call.backward(gradients[0])
        return gradients[0].new_zeros(()), None
