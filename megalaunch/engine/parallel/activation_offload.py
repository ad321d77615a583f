"""Layers whose activations wait in host memory: each storage leaves as autograd keeps it, and comes back early.

The layer in front is fetched when a layer's backward pass begins, on a stream of its own beside the arithmetic.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.param_layout import local_param


class OffloadedTensor(Protocol):
    """The journey of one flat tensor to the host and back."""

    def fetch(self) -> None:
        """Begin to bring it back, if that has not begun."""

    def is_ready(self) -> Tensor:
        """The tensor on its device, once it is there; the trip does not hold it after."""


class _HostCopy:
    """On a processor there is nowhere to go: a copy, so that what is proven there is the same bookkeeping."""

    def __init__(self, flat: Tensor) -> None:
        self._copy = flat.clone()

    def fetch(self) -> None:
        """It is here."""

    def is_ready(self) -> Tensor:
        """The copy."""
        return self._copy


class _PinnedCopy:
    """Through pinned memory, on a stream beside the one that computes."""

    def __init__(self, flat: Tensor) -> None:
        self._device, self._stream = flat.device, _side_stream(flat.device)
        self._back: Tensor | None = None
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
        flat.record_stream(self._stream)  # its memory is not given to others before it has left

    def fetch(self) -> None:
        """Behind all that was sent before."""
        if self._back is None:
            with torch.cuda.stream(self._stream):
                self._back = self._host.to(self._device, non_blocking=True)

    def is_ready(self) -> Tensor:
        """The computing stream waits, not the host."""
        self.fetch()
        assert self._back is not None, "fetch sets it"
        back, self._back = self._back, None
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        back.record_stream(computing)
        return back


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def offload_tensor(flat: Tensor) -> OffloadedTensor:
    """Have a flat tensor leave its device."""
    return _PinnedCopy(flat) if flat.is_cuda else _HostCopy(flat)


@dataclass(eq=False)
class _OffloadedStorage:
    """A storage that is away; held by those who read it later, and by nobody else. `uses`: how many are to come."""

    offloaded: OffloadedTensor
    uses: int = 0
    back: Tensor | None = None

    def value(self) -> Tensor:
        """All of it, held until the last of its uses."""
        back = self.offloaded.is_ready() if self.back is None else self.back
        self.uses -= 1
        self.back = back if self.uses > 0 else None
        return back


@dataclass(eq=False)
class _LayerOffload:
    """One forward pass through one layer: what it sent away, and the pass through the layer in front of it."""

    before: _LayerOffload | None
    kept_here: set[int]
    away: weakref.WeakSet[_OffloadedStorage] = field(default_factory=weakref.WeakSet)
    by_storage: dict[int, tuple[_OffloadedStorage, Tensor]] = field(default_factory=dict)
    fetched: bool = False

    def pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """What autograd keeps in place of a tensor."""
        storage = tensor.untyped_storage()._cdata
        if storage in self.kept_here or not tensor.is_floating_point():  # masks and words are alike for all layers
            return tensor
        if storage not in self.by_storage:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            away = _OffloadedStorage(offload_tensor(tensor.detach().as_strided((size,), (1,), 0)))
            self.by_storage[storage] = away, tensor.detach()  # so that its storage keeps its name meanwhile
            self.away.add(away)
        away = self.by_storage[storage][0]
        away.uses += 1
        shape, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())

        def unpack() -> Tensor:
            if self.before is not None:
                self.before.fetch()
            return away.value().as_strided(shape, stride, offset)

        return unpack

    def fetch(self) -> None:
        """Begin to bring everything back; once, since what was used is not wanted again."""
        if not self.fetched:
            self.fetched = True
            for away in self.away:
                away.offloaded.fetch()


def apply_offload(model: Decoder, count: int) -> None:
    """The first `count` layers' activations wait in host memory, in place; before `fully_shard`, whose hooks stay out.

    What stays on the device: parameters, masks, and inputs that all layers share. The others may be recomputed.
    """
    before: list[_LayerOffload | None] = [None]  # the pass of the layer in front, in the forward pass under way
    layers = list(model.layers.values())
    for number, layer in enumerate(layers[:count]):
        _install_offload_hooks(layer, before, first=number == 0)
    if count and count < len(layers):
        _install_prefetch_hook(layers[count], before)


def _install_offload_hooks(layer: nn.Module, before: list[_LayerOffload | None], first: bool) -> None:
    forward: Callable[..., Tensor] = layer.forward

    def travelling(x: Tensor, *rest: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *rest)
        shared = [leaf for leaf in tree_leaves(rest) if isinstance(leaf, Tensor)]
        kept_here = {_storage(local_param(parameter)) for parameter in layer.parameters()} | set(map(_storage, shared))
        mine = _LayerOffload(None if first else before[0], kept_here)
        before[0] = mine
        try:
            with saved_tensors_hooks(mine.pack, _unpack):
                return forward(x, *rest)
        finally:
            mine.by_storage.clear()

    layer.forward = travelling


def _install_prefetch_hook(layer: nn.Module, before: list[_LayerOffload | None]) -> None:
    """When this layer's backward pass begins, the one in front of it is fetched."""
    forward: Callable[..., Tensor] = layer.forward

    def announcing(x: Tensor, *rest: Any) -> Tensor:
        output, last = forward(x, *rest), before[0]
        before[0] = None
        if last is not None and output.requires_grad:
            output.register_hook(lambda _: last.fetch())  # type: ignore[no-untyped-call]
        return output

    layer.forward = announcing


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
