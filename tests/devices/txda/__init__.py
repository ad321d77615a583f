"""A device for tests, as a vendor's package: importing it adds `txda` and its collectives `tccl` to torch.

Streams do nothing, and operators run on the CPU, but its tensors are no CPU tensors: `device.cpp`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch_txda import _device, _process_group

Stream = torch.Stream
Event = torch.Event
current_device = _device.current_device


def is_available() -> bool:
    """Return True: the device is memory of the host."""
    return True


def is_initialized() -> bool:
    """Return True: there is nothing to start."""
    return True


def device_count() -> int:
    """Return the number of devices."""
    return _device.devices


def set_device(device: torch.device | int) -> None:
    """Make a device the current one."""
    _device.set_device(torch.device("txda", device).index if isinstance(device, int) else device.index)


def _generator(device: torch.device | int | str = -1) -> torch.Generator:
    index = device if isinstance(device, int) else torch.device(device).index
    return _device.generator(current_device() if index is None or index < 0 else index)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def get_rng_state(device: torch.device | int | str = -1) -> torch.Tensor:
    """Return the state of a generator."""
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: torch.device | int | str = -1) -> None:
    """Restore the state of a generator."""
    _generator(device).set_state(state)


def current_stream(device: torch.device | None = None) -> torch.Stream:
    """Return the only stream."""
    return torch.accelerator.current_stream(device)


def stream(stream: torch.Stream | None) -> nullcontext[None]:
    """Do nothing: there is one stream."""
    return nullcontext()


def synchronize(device: torch.device | None = None) -> None:
    """Do nothing: operators return when they are done."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the 16-bit dtypes."""
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False


def _connect(store: dist.Store, rank: int, size: int, timeout: object) -> dist.Backend:
    return _process_group.Tccl(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


torch.utils.rename_privateuse1_backend("txda")
torch._register_device_module("txda", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend("tccl", _connect, devices=["txda"])
