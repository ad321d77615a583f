"""Activation checkpointing for the two backward passes of zero-bubble schedules: recomputed once for both.

`torch.utils.checkpoint` recomputes a function in each call of autograd that reads what it saved. A pass for inputs is
one such call, and torch's pass for weights is one for every few weights: a layer would be recomputed five times, and
all copies held until the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from megalaunch.engine.model.layers import Contexts, Output


def checkpoint_split_backward(
    function: Callable[..., Output], inputs: tuple[Any, ...], contexts: Contexts, *, preserve_rng_state: bool
) -> Output:
    """Run a function of which only the inputs are saved; the first backward pass that needs more runs it again.

    What that recomputes is held as long as the graph of the function: in a whole backward pass, each tensor until its
    operator's backward; after a pass for inputs, until the one for weights has ended.

    Args:
        function: The function.
        inputs: Its arguments.
        contexts: Contexts of both runs.
        preserve_rng_state: Whether both runs draw the same random numbers.
    """
    call = _Call(function, inputs, contexts, _Generators(inputs) if preserve_rng_state else None)
    forward, _ = contexts()
    with forward, saved_tensors_hooks(call.pack, _unpack):
        return function(*inputs)


class _Saved:
    """What autograd holds in place of a tensor that it saves: its place in the function, and later the tensor."""

    __slots__ = ("__weakref__", "call", "tensor")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.tensor: Tensor | None = None


class _Call:
    """One call of a checkpointed function."""

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], contexts: Contexts, generators: _Generators | None
    ) -> None:
        self._function, self._inputs, self._contexts, self._generators = function, inputs, contexts, generators
        self._saved: list[weakref.ref[_Saved]] = []  # autograd frees those of which it has run the backward

    def pack(self, _: Tensor) -> _Saved:
        """Hook of the forward pass."""
        saved = _Saved(self)
        self._saved.append(weakref.ref(saved))
        return saved

    def recompute(self) -> None:
        """Run the function again up to the last tensor that autograd saves, and give all to those that hold them."""
        left = iter(self._saved)
        count = 0

        def keep(tensor: Tensor) -> None:
            nonlocal count
            saved = next(left)()
            count += 1
            if saved is not None:
                saved.tensor = tensor.detach()
            if count == len(self._saved):
                raise _AllSaved

        given = [_detached(value) for value in self._inputs]
        _, recomputation = self._contexts()
        drawn = self._generators.restored() if self._generators else nullcontext()
        try:
            with drawn, torch.enable_grad(), recomputation, saved_tensors_hooks(keep, _not_read):
                self._function(*given)
        except _AllSaved:
            return
        raise RuntimeError(
            f"the recomputation of a checkpointed function saved {count} tensors, its forward pass {len(self._saved)}: "
            "the function must do the same in both"
        )


class _AllSaved(Exception):
    """Ends a recomputation: nothing after the last saved tensor is needed."""


class _Generators:
    """States of torch's generators before a function ran: the CPU's, and those of the devices of its inputs."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*inputs)
        self._type = next((x.device.type for x in inputs if isinstance(x, Tensor) and not x.is_cpu), None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw as then; afterwards the generators are as before."""
        kind = {} if self._type is None else {"device_type": self._type}
        with torch.random.fork_rng(self._devices, **kind):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states, **kind)
            yield


def _unpack(saved: _Saved) -> Tensor:
    if saved.tensor is None:
        saved.call.recompute()
    assert saved.tensor is not None, "a recomputation gives every tensor that is still held"
    return saved.tensor


def _not_read(_: None) -> NoReturn:
    raise AssertionError("no backward pass runs through a recomputation")


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
