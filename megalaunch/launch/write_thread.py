"""Write to storage that may block in the kernel, such as a frozen file system or a server that does not answer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

STALLED_SECONDS = 2.0


class WriteThread:
    """Runs writes in order on a daemon thread: storage that blocks delays them, and not the caller."""

    def __init__(self) -> None:
        self._writes: deque[Callable[[], None]] = deque()  # the first one runs
        self._changed = threading.Condition()
        self._since = 0.0  # when the first one began
        self._has_started = False

    @property
    def is_idle(self) -> bool:
        """Whether all writes have ended."""
        return not self._writes

    @property
    def is_stalled(self) -> bool:
        """Whether a write has not returned for STALLED_SECONDS."""
        with self._changed:
            return bool(self._writes) and time.monotonic() - self._since > STALLED_SECONDS

    def submit(self, write: Callable[[], None], seconds: float) -> bool:
        """Run a write, which must not raise; return whether it ended within `seconds`, for which the caller waits."""
        with self._changed:
            if not self._writes:
                self._since = time.monotonic()
            self._writes.append(write)
            self._changed.notify_all()
            if not self._has_started:
                self._has_started = True
                threading.Thread(target=self._run, name="writes", daemon=True).start()
            return self._changed.wait_for(lambda: write not in self._writes, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._writes))
                write = self._writes[0]
            write()
            with self._changed:
                self._writes.popleft()
                self._since = time.monotonic()
                self._changed.notify_all()
