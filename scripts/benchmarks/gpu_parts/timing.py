"""Time of a call on a device: the median of many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_CPU_CALLS = 3


def median_seconds(call: Callable[[], object], device: str) -> float:
    """Return the median seconds of a call after warming up.

    On a GPU by events, with the L2 cache flushed before each call, so that inputs are read from the card's memory.
    """
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=20, rep=100, return_mode="median")) / 1e3
    call()
    found = []
    for _ in range(_CPU_CALLS):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |found - expected| / |expected|."""
    wide = expected.float()
    return float((found.float() - wide).norm() / wide.norm().clamp(min=1e-30))
