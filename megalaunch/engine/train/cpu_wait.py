"""Measure the share of the time in which a thread could run but had no CPU.

The kernel counts it for each thread: others run there, or the limit of a cgroup is reached. It is counted from one
reading to the next, so that no moment between them is missed, as a benchmark of a few milliseconds would miss it.
"""

from __future__ import annotations

import time
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds on a CPU, nanoseconds without one, turns


class CpuWait:
    """The share for the thread that reads it; 0 where the kernel does not count."""

    def __init__(self, schedstat: Path = _SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._waited, self._read_at = self._read()

    def share(self) -> float:
        """Return the share since the last call or the construction."""
        waited, now = self._read()
        share = (waited - self._waited) / max(now - self._read_at, 1)
        self._waited, self._read_at = waited, now
        return min(max(share, 0.0), 1.0)

    def _read(self) -> tuple[int, int]:
        """Return nanoseconds without a CPU so far, and those of the monotonic clock."""
        try:
            waited = int(self._schedstat.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            waited = 0
        return waited, time.monotonic_ns()
