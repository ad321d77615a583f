"""Count the waits for each file of the run directory, so that those that overlap are reported as one."""

from __future__ import annotations

import threading
from pathlib import Path


class StorageWaits:
    """Waits of one process for the storage. Threads may share it.

    A checkpoint waits for the metrics that are written in the background: both waits are for the same file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: dict[Path, int] = {}
        self._longest: dict[Path, float] = {}

    def begin(self, path: Path) -> bool:
        """Count a wait for `path`; return whether it is the only one."""
        with self._lock:
            self._count[path] = self._count.get(path, 0) + 1
            return self._count[path] == 1

    def end(self, path: Path, seconds: float) -> float | None:
        """End a wait for `path`; return the seconds of the longest one if none is left, else None."""
        with self._lock:
            longest = max(seconds, self._longest.get(path, 0.0))
            self._count[path] -= 1
            if self._count[path]:
                self._longest[path] = longest
                return None
            del self._count[path]
            self._longest.pop(path, None)
            return longest
