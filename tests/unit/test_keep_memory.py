"""A worker on processors does not hand the memory of freed tensors back to the kernel."""

import ctypes
import resource
import subprocess
import sys

import pytest

from megalaunch.engine.process import keep_freed_memory

STEPS = """
import resource, sys
from megalaunch.engine.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(3):
    bytes(bytearray(64 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    bytes(bytearray(64 << 20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(word: str) -> int:
    return int(subprocess.run([sys.executable, "-c", STEPS, word], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_pages_of_freed_memory_are_used_again():
    pages = 3 * (64 << 20) // resource.getpagesize()
    assert _faults("kept") < pages / 100
    assert _faults("given back") > pages / 100, "the test would pass without it"


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
    keep_freed_memory()
    assert set_to == {-3: taken, -1: 2**30}
