"""The memory of a test process goes to huge pages, and forks of it are counted."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import huge_pages
import pytest
from huge_pages import EVERY, HUGE_PAGE, MADV_COLLAPSE, collapse_memory

PAGES = 8


def on_huge_pages() -> int:
    """Bytes of this process that are on huge pages."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return next(int(row[1]) * 1024 for row in rows if row[0] == "AnonHugePages:")


@pytest.fixture
def memory():
    """Written memory of nobody else, in several huge pages; skips where the kernel cannot collapse it."""
    memory = mmap.mmap(-1, (PAGES + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(b"x" * len(memory))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    probe = mmap.mmap(-1, 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    probe.write(b"x" * len(probe))
    address = ctypes.addressof(ctypes.c_char.from_buffer(probe))
    if madvise(-(-address // HUGE_PAGE) * HUGE_PAGE, HUGE_PAGE, MADV_COLLAPSE):
        pytest.skip("needs Linux 6.1 with huge pages")
    return memory


def test_memory_goes_to_huge_pages_and_keeps_its_content(memory):
    memory.madvise(mmap.MADV_HUGEPAGE)
    before = on_huge_pages()
    collapse_memory()
    assert on_huge_pages() >= before + PAGES * HUGE_PAGE
    assert memory[:] == b"x" * len(memory)


@pytest.mark.parametrize("is_timed", [False, True])
def test_many_forks_are_due_once_and_never_in_a_timed_test(request, monkeypatch, is_timed):
    calls = []
    monkeypatch.setattr(huge_pages, "collapse_memory", lambda: calls.append(None))
    monkeypatch.setattr(huge_pages, "_forks", EVERY - 1)
    if is_timed:
        request.node.add_marker("timed")
    huge_pages.pytest_runtest_setup(request.node)
    assert not calls
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(2):
        huge_pages.pytest_runtest_setup(request.node)
    assert len(calls) == (0 if is_timed else 1)
