"""Activation offload: tensors that layers save for backward are copied to host memory and prefetched for backward.

Each storage is copied once, when autograd first saves it. When the backward pass of layer i starts, the activations of
layer i - 1 are fetched on a side stream, so that the copies overlap with the computation of layer i.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.layers import Output, SavePolicy
from megalaunch.engine.model.transformer_block import TransformerBlock
from megalaunch.engine.param_layout import local_param
from megalaunch.engine.platform.pinned_buffer import PinnedPool
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.torch_private import storage_id, tree_leaves


class OffloadedTensor(Protocol):
    """One flat tensor that was offloaded to the host."""

    def fetch(self) -> None:
        """Start the copy back to the device, unless it was started before."""

    def wait(self) -> Tensor:
        """Wait for the copy, return the tensor on its device and drop the reference to it."""


class _HostCopy:
    """CPU stand-in for the pinned-memory copy: a clone, so that tests on CPU exercise the same bookkeeping."""

    def __init__(self, flat: Tensor) -> None:
        self._copy = flat.clone()

    def fetch(self) -> None:
        """Do nothing: the copy is on the device."""

    def wait(self) -> Tensor:
        """Return the copy."""
        return self._copy


class _PinnedCopy:
    """A copy in pinned host memory, made and fetched asynchronously on a side stream."""

    def __init__(self, flat: Tensor) -> None:
        self._device, self._stream = flat.device, _side_stream(flat.device)
        self._back: Tensor | None = None
        self._stream.wait_stream(platform_of(flat.device).current_stream(flat.device))
        pool = _pinned_pool(flat.device)
        self._host = pool.take(flat.shape, flat.dtype)
        # Whoever takes it next queues a copy to it on the same stream, behind the copies from it.
        weakref.finalize(self, pool.give_back, self._host).atexit = False
        with self._stream:
            self._host.copy_(flat, non_blocking=True)
        flat.record_stream(self._stream)  # the allocator must not reuse its memory before the copy is done

    def fetch(self) -> None:
        """Start the copy to the device, behind the copies that the side stream already has."""
        if self._back is None:
            with self._stream:
                self._back = self._host.to(self._device, non_blocking=True)

    def wait(self) -> Tensor:
        """Make the compute stream wait for the copy and return the tensor. The host does not wait."""
        self.fetch()
        assert self._back is not None, "fetch sets it"
        back, self._back = self._back, None
        computing = platform_of(self._device).current_stream(self._device)
        computing.wait_stream(self._stream)
        back.record_stream(computing)
        return back


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    return platform_of(device).make_stream(device)


@cache
def _pinned_pool(device: torch.device) -> PinnedPool:
    return PinnedPool(platform_of(device))


def offload_tensor(flat: Tensor) -> OffloadedTensor:
    """Start the copy of a flat tensor to host memory."""
    return _PinnedCopy(flat) if platform_of(flat.device).pins_host_memory else _HostCopy(flat)


Offload = Callable[[Tensor], OffloadedTensor]
"""Starts the copy of a flat tensor to host memory, as `offload_tensor` does."""


@dataclass(eq=False)
class _OffloadedStorage:
    """An offloaded storage. Only the unpack functions of its readers hold it; `uses` counts the reads still to come."""

    offloaded: OffloadedTensor
    uses: int = 0
    back: Tensor | None = None

    def value(self) -> Tensor:
        """Return the whole storage as a flat tensor, which is held until its last use."""
        back = self.offloaded.wait() if self.back is None else self.back
        self.uses -= 1
        self.back = back if self.uses > 0 else None
        return back


@dataclass(eq=False)
class _LayerOffload:
    """One forward pass of one layer: the storages that it offloaded, and the pass of the preceding layer (`before`).

    `on_device` names the storages that stay on the device: parameters, and inputs that all layers share.
    """

    before: _LayerOffload | None
    on_device: set[int]
    offload: Offload
    away: weakref.WeakSet[_OffloadedStorage] = field(default_factory=weakref.WeakSet)
    by_storage: dict[int, tuple[_OffloadedStorage, Tensor]] = field(default_factory=dict)
    fetched: bool = False

    def pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Offload a tensor that autograd saves for backward: return it unchanged, or the function that fetches it."""
        storage = storage_id(tensor)
        if storage in self.on_device or not tensor.is_floating_point():  # masks and token ids are shared by all layers
            return tensor
        if storage not in self.by_storage:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            away = _OffloadedStorage(self.offload(tensor.detach().as_strided((size,), (1,), 0)))
            self.by_storage[storage] = away, tensor.detach()  # held, so that the storage address is not reused
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
        """Start the copies of all storages of this layer, once: a storage that was used is not fetched again."""
        if not self.fetched:
            self.fetched = True
            for away in self.away:
                away.offloaded.fetch()


def apply_offload(model: Decoder, count: int, offload: Offload = offload_tensor) -> None:
    """Offload the activations of the first `count` layers (Megatron's `--cpu-offloading-num-layers`), in place.

    Parameters, masks and inputs that all layers share stay on the device. Activations of the other layers stay there
    too, or are recomputed. Call it before `fully_shard`, whose hooks then stay outside the saved-tensor hooks.
    """
    current = _ForwardPass()
    layers = list(model.layers.values())
    for number, layer in enumerate(layers[:count]):
        assert isinstance(layer, TransformerBlock)
        layer.save_policy = _OffloadPolicy(layer, layer.save_policy, current, number == 0, offload)
    if count and count < len(layers):
        following = layers[count]
        assert isinstance(following, TransformerBlock)
        following.save_policy = _PrefetchPolicy(following.save_policy, current)


@dataclass
class _ForwardPass:
    """The current forward pass: the last layer that offloaded its activations so far."""

    last: _LayerOffload | None = None


@dataclass(frozen=True)
class _OffloadPolicy:
    """`SavePolicy` of a layer whose activations are offloaded; `inner` is the policy that it had."""

    layer: TransformerBlock
    inner: SavePolicy
    current: _ForwardPass
    first: bool
    offload: Offload

    def __call__(self, forward: Callable[..., Output], /, *inputs: Any) -> Output:
        """Run the layer with saved-tensor hooks that offload what autograd saves."""
        if not torch.is_grad_enabled():
            return self.inner(forward, *inputs)
        shared = [leaf for leaf in tree_leaves(inputs[1:]) if isinstance(leaf, Tensor)]
        parameters = [local_param(parameter) for parameter in self.layer.parameters()]
        on_device = {storage_id(tensor) for tensor in (*parameters, *shared)}
        this_pass = _LayerOffload(None if self.first else self.current.last, on_device, self.offload)
        self.current.last = this_pass
        try:
            with saved_tensors_hooks(this_pass.pack, _unpack):
                return self.inner(forward, *inputs)
        finally:
            this_pass.by_storage.clear()


@dataclass(frozen=True)
class _PrefetchPolicy:
    """`SavePolicy` of the first layer that is not offloaded: its backward pass starts to fetch the layer before it."""

    inner: SavePolicy
    current: _ForwardPass

    def __call__(self, forward: Callable[..., Output], /, *inputs: Any) -> Output:
        """Run the layer by the inner policy, with a hook on the gradient of its output."""
        output, last = self.inner(forward, *inputs), self.current.last
        self.current.last = None
        if last is not None and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: last.fetch())  # type: ignore[no-untyped-call]
        return output


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()
