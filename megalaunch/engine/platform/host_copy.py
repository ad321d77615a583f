"""Copies from the host to a device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.engine.platform.registry import platform_of


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on a device; the tensor itself if it is there already.

    It is copied from pinned memory where the platform has it: a copy from pageable memory starts when the device has
    done all earlier work, and the host waits for it.
    """
    if device.type in (values.device.type, "meta"):
        return values.to(device)
    has_memory = type(values) is Tensor  # a simulated tensor has none to pin
    source = values.pin_memory() if has_memory and platform_of(device).pins_host_memory else values
    return source.to(device, non_blocking=True)
