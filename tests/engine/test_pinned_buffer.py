"""Pinned buffers: their exact size, and that they are unpinned once, while their memory is still there."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from megalaunch.engine.parallel.activation_offload import offload_tensor
from megalaunch.engine.platform.cpu import CpuPlatform
from megalaunch.engine.platform.pinned_buffer import PinnedPool, pinned_zeros
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


def test_a_pool_uses_its_buffers_again():
    platform = PinsPages()
    pool = PinnedPool(platform)
    first, second = (pool.take((3, 2**20), torch.float32) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert first.shape == (3, 2**20)
    address = first.data_ptr()
    pool.give_back(first)
    again = pool.take((6, 2**20 - 8), torch.bfloat16)  # a little smaller, in another dtype
    assert again.data_ptr() == address
    assert (again.shape, again.dtype) == ((6, 2**20 - 8), torch.bfloat16)
    assert pool.take((3, 2**20), torch.float32).data_ptr() != address
    assert len(platform.pinned) == 3


@pytest.mark.parametrize("length", [2**20, 2**20 + 1, 3 * 2**19 + 5, 2**21 - 1])
def test_a_buffer_of_a_pool_is_at_most_an_eighth_larger(length):
    platform = PinsPages()
    assert PinnedPool(platform).take((length,), torch.uint8).numel() == length
    assert length <= platform.pinned[0][1] <= length * 9 / 8


def test_sizes_of_a_pool_are_few():
    """Whatever the sizes of tensors, those that were given back serve again."""
    platform = PinsPages()
    pool = PinnedPool(platform)
    for length in range(2**20, 2**21, 1001):
        pool.give_back(pool.take((length,), torch.uint8))
    assert len(platform.pinned) == 9


def test_a_pool_gives_tensors_without_numbers():
    platform = PinsPages()
    platform.pins_host_memory = False
    assert PinnedPool(platform).take((0, 4), torch.float32).shape == (0, 4)


@pytest.mark.gpu
def test_activations_come_back_from_a_pool():
    """Each copy is read after a later one was sent, whose buffer another one had before."""
    device = torch.device("cuda")
    for step in range(3):
        sent = [offload_tensor(torch.full((2**20 + step,), 10.0 * step + i, device=device)) for i in range(4)]
        for i, one in enumerate(sent):
            one.fetch()
            assert one.wait().eq(10.0 * step + i).all()


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
