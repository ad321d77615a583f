"""A worker on processors does not hand the memory of freed tensors back to the kernel."""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megalaunch.engine import worker_setup
from megalaunch.engine.worker_setup import tune_malloc

STEPS = """
import resource, sys
from megalaunch.engine.worker_setup import tune_malloc
if sys.argv[1] == "kept":
    tune_malloc()
for _ in range(3):
    bytes(bytearray(64 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    bytes(bytearray(64 << 20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> int:
    return int(subprocess.run([sys.executable, "-c", STEPS, mode], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_pages_of_freed_memory_are_used_again():
    pages = 3 * (64 << 20) // resource.getpagesize()
    assert _faults("kept") < pages / 100
    assert _faults("given back") > pages / 100, "the test would pass without it"


# Kilobytes of addresses that huge pages are asked for, and of memory that is taken.
HUGE = r"""
import re, resource, sys
from megalaunch.engine.worker_setup import tune_malloc
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
tune_malloc()
areas = re.findall(r"^Size: +([0-9]+) kB$.*?^VmFlags:([a-z0-9 ]*)$", open("/proc/self/smaps").read(), re.M | re.S)
print(sum(int(size) for size, flags in areas if "hg" in flags.split()))
print(re.search(r"VmRSS:\s+([0-9]+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a kernel without huge pages")
@pytest.mark.parametrize(("limit", "asked"), [("unlimited", 2**30 - 2**24 - 2**21), ("limited", 0)])
def test_what_malloc_gives_next_lies_on_huge_pages(limit, asked):
    done = subprocess.run([sys.executable, "-c", HUGE, limit], check=True, capture_output=True, text=True)
    found, taken = map(int, done.stdout.split())
    assert found == asked // 1024
    assert taken < 100_000, "reserved, not taken"


@pytest.mark.parametrize(("refused_above", "taken"), [(2**40, 2**30), (2**25, 2**25)])
def test_an_older_glibc_takes_the_most_it_allows(refused_above, taken, monkeypatch):
    """Else its threshold would stay at 128 KiB: setting another option ends its own adjustment of it."""
    set_to = {}

    class Library:
        @staticmethod
        def mallopt(option, value):
            if option == -3 and value > refused_above:
                return 0
            set_to[option] = value
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(worker_setup, "_reserve_huge_pages", lambda libc: None)
    tune_malloc()
    assert set_to == {-3: taken, -1: 2**30}
