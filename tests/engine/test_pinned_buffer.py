"""Pinned buffers: their exact size, and that they are unpinned once, while their memory is still there."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from megalaunch.engine.platform.cpu import CpuPlatform
from megalaunch.engine.platform.pinned_buffer import pinned_zeros
from megalaunch.engine.platform.registry import platform_of


class PinsPages(CpuPlatform):
    """A platform that records the pages it pins, and reads their first bytes when it unpins them."""

    pins_host_memory = True

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[tuple[int, int]] = []

    def pin_pages(self, address, length):
        self.pinned.append((address, length))
        return lambda: self.unpinned.append((address, ctypes.c_uint8.from_address(address).value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pages_of_the_exact_size_are_pinned_until_the_last_view_is_gone(dtype):
    platform = PinsPages()
    buffer = pinned_zeros((2**10 + 1, 3 * 2**9), dtype, platform)
    assert (buffer.shape, buffer.dtype, buffer.count_nonzero()) == ((2**10 + 1, 3 * 2**9), dtype, 0)
    address = buffer.data_ptr()
    assert platform.pinned == [(address, buffer.numel() * dtype.itemsize)]
    buffer.view(torch.uint8).fill_(7)
    view = buffer[-1]
    del buffer
    gc.collect()
    assert not platform.unpinned
    del view
    gc.collect()
    assert platform.unpinned == [(address, 7)]


def test_memory_of_a_platform_without_pinned_memory_is_torch_s():
    platform = PinsPages()
    platform.pins_host_memory = False
    assert pinned_zeros((2**20,), torch.float32, platform).untyped_storage().nbytes() == 2**22
    assert not platform.pinned


@pytest.mark.gpu
def test_the_driver_takes_the_pages_as_pinned():
    device = torch.device("cuda")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    buffer = pinned_zeros((3 * 2**20,), torch.float32, platform_of(device))
    assert buffer.is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
    buffer.copy_(torch.arange(3 * 2**20, device=device), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer, torch.arange(3 * 2**20, dtype=torch.float32))
    del buffer
    again = pinned_zeros((3 * 2**20,), torch.float32, platform_of(device))  # perhaps the same pages: pinned again
    assert again.is_pinned()
