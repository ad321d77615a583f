"""Put the memory of a test process that forks on huge pages, of which a fork copies one entry in place of 512.

A worker of the whole selection grows beyond 1 GB. A forked rank that does nothing then costs 75 ms of system time, on
huge pages 14 ms. A page that a fork writes to is still copied alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HUGE_PAGE = 2 * 2**20
EVERY = 20  # forks; the first time takes 2 s a GB, later ones 0.02 s
MADV_COLLAPSE = 25  # of madvise(2), Linux 6.1; an older one refuses, and the pages stay as they are
_MAPS = Path("/proc/self/maps")

_forks = 0


def pytest_configure() -> None:
    """Count the forks of this process."""
    os.register_at_fork(after_in_parent=_count_fork)


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Collapse the memory again after many forks; never for tests that measure memory."""
    global _forks
    if _forks >= EVERY and item.get_closest_marker("timed") is None:
        _forks = 0
        collapse_memory()


def collapse_memory() -> None:
    """Move the private memory of this process, without files', to huge pages, where the kernel can."""
    if not _MAPS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in list(_private_memory()):
        madvise(begin, end - begin, MADV_COLLAPSE)


def _private_memory() -> Iterator[tuple[int, int]]:
    """Yield the addresses, in whole huge pages, of what was allocated."""
    for line in _MAPS.read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if rights.startswith("rw-p") and inode == "0" and name in ([], ["[heap]"]) and begin < end:
            yield begin, end


def _count_fork() -> None:
    global _forks
    _forks += 1
