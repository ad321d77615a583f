"""Flushes a growing file to disk while it is written, so that the final sync is short."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

_SYNCED_AT_ONCE = 1 << 23  # bytes between syncs, about as many as are left for the final one


class BackgroundFsync:
    """Calls fdatasync on a file from time to time in a thread; `finish` raises its errors."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._written = 0

    def notify_written(self, file: int, size: int) -> None:
        """Count `size` bytes appended to a file descriptor, which must stay open until `finish`."""
        self._written += size
        if self._written < _SYNCED_AT_ONCE or (self._running is not None and not self._running.done()):
            return
        self.finish()
        self._written = 0
        self._running = self._thread.submit(os.fdatasync, file)

    def finish(self) -> None:
        """Wait for the running sync. Raises its OSError, since the kernel reports a failed write only once."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait and end the thread; errors are ignored."""
        self._thread.shutdown()
