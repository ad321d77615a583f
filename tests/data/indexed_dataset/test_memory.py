"""A token file far larger than memory is opened and read in constant memory; a file that fails is named."""

import os
import subprocess
import sys

import numpy as np
import pytest
from token_files import write_tokens

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import HEADER, MAGIC, TokenReader, bin_path, idx_path

GIGABYTE = 2**30
PROGRAM = """
import re, resource, sys
from pathlib import Path
import numpy as np
from megalaunch.data.samples.gpt_dataset import GPTDataset

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

before = rss()
samples = GPTDataset(Path(sys.argv[1]), 4096, 100_000, 1, None, 50_000, Path(sys.argv[2]))
opened = rss()
random = np.random.RandomState(0)

def read():
    for index in random.randint(0, len(samples), 4000):
        assert samples[int(index)].shape == (4097,)
    return rss()

first, after = read(), read()
peak = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]  # ru_maxrss has the parent's in it
print(before, opened, first, after, int(peak) * 1024)
"""


def test_sixty_four_gigabytes_load_in_constant_memory(tmp_path):
    """32 G tokens in 500,000 documents of 64 k; the files are holes on disk."""
    prefix, count, length = tmp_path / "huge", 500_000, 2**16
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        file.write(np.full(count, length, "<i4").tobytes())
        file.write((np.arange(count, dtype="<i8") * length * 2).tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    bin_path(prefix).touch()
    os.truncate(bin_path(prefix), count * length * 2)
    assert bin_path(prefix).stat().st_size > 60 * GIGABYTE
    command = [sys.executable, "-c", PROGRAM, str(prefix), str(tmp_path / "orders")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    before, opened, first, after, peak = map(int, done.stdout.split())
    assert opened - before < 300e6
    assert first - opened < 130e6, "more than the order of 8 M samples, which is 96 MB of mapped files"
    assert after - first < 20e6, "4000 more samples are 33 MB of tokens, and some of them stay"
    assert peak < 800e6


def test_a_file_that_ends_too_soon_is_an_error_and_no_signal(tmp_path):
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3, 4]])
    reader = TokenReader(bin_path(prefix), np.dtype("<u2"))
    assert reader.read(1, 3).tolist() == [2, 3, 4]
    assert reader.read(2, 0).tolist() == []
    os.truncate(bin_path(prefix), 4)
    with pytest.raises(DataError, match=r"a\.bin: it ends before token 4"):
        reader.read(1, 3)
    with pytest.raises(DataError, match=r"none\.bin: cannot read it"):
        TokenReader(tmp_path / "none.bin", np.dtype("<u2"))
