"""Optimizer states in host memory, updated there (ZeRO-Offload, Ren et al. 2021; Megatron's --optimizer-cpu-offload).

Per step and parameter: weight and gradient are copied to the host, the host updates weight and states, and the weight
is copied back. The copies run on two streams, one a direction, so that they overlap with each other, with the update of
the parameters that stay on the device, and with the host's update of the parameters before.

The device's weight is the only one: the host keeps no second copy that a loaded checkpoint could leave behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.platform.pinned_buffer import pinned_zeros
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.torch_private import with_local_shard


class HostCopies(Protocol):
    """Where offloaded states are, and the copies of weights and gradients from and to the device."""

    def zeros_like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros for a state of a parameter, sharded as it is."""

    def send(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        """Start the copies of local shards to the host."""

    def receive(self, name: str) -> tuple[Tensor, Tensor]:
        """Wait for weight and gradient of a parameter and return the host's copies."""

    def send_back(self, name: str, weight: Tensor) -> None:
        """Start the copy of the host's updated weight to the device's shard."""

    def finish(self) -> None:
        """Order all later work on the device after the copies to it."""


class PinnedHostCopies:
    """Copies in pinned memory on two streams. On a CPU, whose memory is the host's, they are plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._platform = device, platform_of(device)
        self._pins = self._platform.pins_host_memory
        self._to_host = self._platform.make_stream(device) if self._pins else None
        self._to_device = self._platform.make_stream(device) if self._pins else None
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        self._copied: dict[str, torch.Event] = {}

    def zeros_like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory; a DTensor of the parameter's global shape if the parameter is one."""
        return with_local_shard(parameter, pinned_zeros(to_local_no_grad(parameter).shape, dtype, self._platform))

    def send(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        """Start the copies to buffers that are allocated once: pinning memory takes longer than a copy."""
        if name not in self._buffers:
            weight_buffer, gradient_buffer = (
                pinned_zeros(one.shape, one.dtype, self._platform) for one in (weight, gradient)
            )
            self._buffers[name] = weight_buffer, gradient_buffer
        if self._to_host is not None:  # behind what computes the gradient
            self._to_host.wait_stream(self._platform.current_stream(self._device))
        with self._on(self._to_host):
            for buffer, source in zip(self._buffers[name], (weight, gradient), strict=True):
                buffer.copy_(source, non_blocking=self._pins)
        if self._to_host is not None:
            self._copied[name] = self._to_host.record_event()

    def receive(self, name: str) -> tuple[Tensor, Tensor]:
        """Block until the copies have arrived."""
        if name in self._copied:
            self._copied.pop(name).synchronize()
        return self._buffers[name]

    def send_back(self, name: str, weight: Tensor) -> None:
        """Copy the host's weight to the device; `receive` has waited for the last read of the device's."""
        with self._on(self._to_device):
            weight.copy_(self._buffers[name][0], non_blocking=self._pins)

    def finish(self) -> None:
        """Let the compute stream wait for the weights. The host does not wait."""
        if self._to_device is not None:
            self._platform.current_stream(self._device).wait_stream(self._to_device)

    @staticmethod
    def _on(stream: torch.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else stream


def choose_offloaded(parameters: Mapping[str, Tensor], fraction: float) -> frozenset[str]:
    """Return the parameters whose states are offloaded: about a fraction of this rank's numbers, never more.

    The largest ones first, as long as they fit into the fraction: the rest is smaller than the smallest parameter left.
    """
    sizes = {name: to_local_no_grad(parameter).numel() for name, parameter in parameters.items()}
    left = fraction * sum(sizes.values())
    chosen = set()
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: equal sizes in the order of the model
        if 0 < sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    return frozenset(chosen)
