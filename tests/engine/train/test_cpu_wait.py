"""The share of the time that a thread waits for a CPU, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megalaunch.engine.train.cpu_wait import CpuWait

SCHEDSTAT = Path("/proc/thread-self/schedstat")


@contextmanager
def beside_a_busy_process() -> Iterator[None]:
    """Share one CPU with a process that never rests."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])  # which inherits the CPU
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, own)


def compute(seconds: float) -> None:
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        pass


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="the kernel does not count waits for a CPU")
def test_a_thread_that_shares_a_cpu_waits_and_one_that_rests_does_not():
    wait = CpuWait()
    time.sleep(0.5)
    at_rest = wait.share()
    with beside_a_busy_process():
        wait.share()
        compute(0.5)
        assert max(0.25, at_rest) < wait.share() < 1


def test_each_share_counts_from_the_one_before(tmp_path, monkeypatch):
    now, schedstat = iter((0, 1000, 3000)), tmp_path / "schedstat"
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(now))
    schedstat.write_text("7 100 3")
    wait = CpuWait(schedstat)
    schedstat.write_text("8 600 4")
    assert wait.share() == 0.5
    schedstat.write_text("9 1100 5")
    assert wait.share() == 0.25


def test_without_the_kernel_s_count_nobody_waits(tmp_path):
    assert CpuWait(tmp_path / "absent").share() == 0.0
