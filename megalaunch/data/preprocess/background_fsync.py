"""Bringing a growing file to the disk while it is written, so that its end need not wait for all of it."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

_SYNCED_AT_ONCE = 1 << 23  # bytes; at the end about so many are still to be synced


class BackgroundFsync:
    """Syncs a file now and then in a thread of its own; `finish` tells what went wrong there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._written = 0

    def notify_written(self, file: int, size: int) -> None:
        """Say that so many bytes were appended to a file descriptor, which stays open until `finish`."""
        self._written += size
        if self._written < _SYNCED_AT_ONCE or (self._running is not None and not self._running.done()):
            return
        self.finish()
        self._written = 0
        self._running = self._thread.submit(os.fdatasync, file)

    def finish(self) -> None:
        """Wait for what is under way. Raises OSError: the system tells of a failed write once, here or never."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and end the thread; what went wrong no longer matters."""
        self._thread.shutdown()
