"""A differentiable collective in two calls, so that compute between them overlaps with it, in backward as in forward.

Forward:   start -> compute -> finish
Backward:  finish' starts the transposed collective -> the backward of the compute -> start' waits for it

Autograd runs the nodes that are ready in the reverse order of their creation: the backward of what was called between
`start` and `finish` runs between the backward of `finish` and that of `start`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function, apply_tuple_function
from megalaunch.engine.collectives import AsyncCollective

StartCollective = Callable[[Tensor], AsyncCollective]


class InFlight(Protocol):
    """An exchange of one or more tensors in flight."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the exchange and return its results."""


StartExchange = Callable[..., InFlight]


class OverlappedExchange:
    """One exchange of several tensors, started when this object is made; call `finish` exactly once."""

    def __init__(self, inputs: tuple[Tensor, ...], forward: StartExchange, backward: StartExchange) -> None:
        """Start the exchange `forward` of the inputs; `backward` starts its transpose, of the results' gradients."""
        self.forward, self.backward = forward, backward
        self.in_flight: InFlight | None = None
        self._token: Tensor | None = apply_function(_Start, self, *inputs)

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for the exchange and return its results."""
        token, self._token = self._token, None  # its graph refers to this object: a cycle would hold both
        return apply_tuple_function(_Finish, token, self)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for what is in flight: the exchange, or in backward its transpose."""
        assert self.in_flight is not None, "nothing was started"
        in_flight, self.in_flight = self.in_flight, None
        return in_flight.wait()


class OverlappedCollective:
    """One call of a collective of one tensor, started when this object is made; call `finish` exactly once."""

    def __init__(self, x: Tensor, forward: StartCollective, backward: StartCollective) -> None:
        """Start the collective `forward` of `x`; `backward` starts its transpose."""
        self._exchange = OverlappedExchange((x,), _of_one(forward), _of_one(backward))

    def finish(self) -> Tensor:
        """Wait for the collective and return its result."""
        (result,) = self._exchange.finish()
        return result


class _OneTensor:
    """A collective in flight, as an exchange."""

    def __init__(self, collective: AsyncCollective) -> None:
        self._collective = collective

    def wait(self) -> tuple[Tensor, ...]:
        return (self._collective.wait(),)


def _of_one(start: StartCollective) -> StartExchange:
    return lambda x: _OneTensor(start(x))


class _Start(torch.autograd.Function):
    """Forward: start the exchange, and return a token for its results. Backward: wait for the transpose."""

    @staticmethod
    def forward(ctx: Any, call: OverlappedExchange, *inputs: Tensor) -> Tensor:
        ctx.call = call
        call.in_flight = call.forward(*inputs)
        return inputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.wait()


class _Finish(torch.autograd.Function):
    """Forward: wait for the exchange. Backward: start its transpose."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: OverlappedExchange) -> tuple[Tensor, ...]:
        ctx.call = call
        return call.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call.in_flight = ctx.call.backward(*gradients)
        return gradients[0].new_zeros(()), None
