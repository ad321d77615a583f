"""Buffers in pinned host memory: of exactly the size that is asked for, or used again and again."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalaunch.engine.platform.platform import Platform

_SMALLEST = 2**20  # bytes: below it the rounding of torch's allocator costs less than pages of its own
_CLASSES = 8  # sizes of a pool's buffers between two powers of two


def pinned_zeros(shape: Sequence[int], dtype: torch.dtype, platform: Platform) -> Tensor:
    """Return zeros in host memory, pinned if copies between it and a device of the platform are then asynchronous.

    torch's allocator of pinned memory rounds up to powers of two, which may double the memory of large buffers. These
    are pages of their own, pinned in place. Pinning takes longer than a copy, and unpinning waits for the device: for
    buffers that are used as long as the run lasts.

    Raises:
        RuntimeError: The memory cannot be pinned.
    """
    length = math.prod(shape) * dtype.itemsize
    if not platform.pins_host_memory:
        return torch.zeros(*shape, dtype=dtype, device="cpu")
    pages = _pinned_pages(length, platform) if length >= _SMALLEST else None
    if pages is None:
        return torch.zeros(*shape, dtype=dtype, device="cpu", pin_memory=True)
    return torch.from_numpy(pages).view(dtype).view(*shape)


def _pinned_pages(length: int, platform: Platform) -> np.ndarray | None:
    """Return pages as an array of bytes that unpins them before they are unmapped; None if the platform cannot."""
    pages = np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)
    unpin = platform.pin_pages(pages.ctypes.data, length)
    if unpin is None:
        return None
    weakref.finalize(pages, unpin).atexit = False  # the driver may be gone by then, and its pins with it
    return pages


class PinnedPool:
    """Pinned buffers that one stream copies to and from, and that are used again.

    Their sizes are rounded up by at most an eighth, so that tensors whose sizes change from step to step share them.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a buffer with any content.

        Raises:
            RuntimeError: No more memory can be pinned.
        """
        length = math.prod(shape) * dtype.itemsize
        step = max(dtype.itemsize, (1 << length.bit_length() - 1) // _CLASSES) if length else 1
        free = self._free[-(-length // step) * step]
        buffer = free.pop() if free else pinned_zeros((-(-length // step) * step,), torch.uint8, self._platform)
        return buffer[:length].view(dtype).view(*shape)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back, of which the stream has no more copies to queue: later copies to it run behind those."""
        whole = buffer.untyped_storage()
        self._free[whole.nbytes()].append(torch.empty(0, dtype=torch.uint8).set_(whole))
