"""How long a process waits for storage that cannot be written for a time: full, read-only, or gone.

Such a failure delays a run and ends it only at the deadline (`run.storage_timeout`).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

MAY_PASS = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
        *(errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESHUTDOWN, errno.ENODEV),
        *(errno.ENOENT, errno.EACCES),  # below the mount point of a file system that is not mounted
    )
)
"""Errors of the storage of a run directory that may pass without a change to the run."""
_NOT_MOUNTED = (errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ESTALE)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries: doubled from the first to the longest."""
STOP_SECONDS = 5.0
"""Seconds that a wait may still take after a request to stop."""


def may_pass(error: OSError) -> bool:
    """Return whether a failed write may succeed later."""
    return error.errno in MAY_PASS


def remedy(error: OSError) -> str:
    """Return what a user can do about a write that failed, in the imperative."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space there"
    return "mount it again" if error.errno in _NOT_MOUNTED else "make it writable again"


class StorageWait:
    """The wait of one process, or of one thread, from the first failure to the first success.

    Args:
        timeout: Seconds after which the wait is over.
        stop_requested: Whether the run is asked to stop; the wait is then over after STOP_SECONDS.
    """

    def __init__(self, timeout: float, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self._timeout, self._stop_requested = timeout, stop_requested
        self._since: float | None = None
        self._stop_since: float | None = None
        self._pause, self._next_try = FIRST_PAUSE, 0.0

    @property
    def has_begun(self) -> bool:
        """True from a failure to the next success."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Seconds since the first failure; 0 outside of a wait."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def seconds_left(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._timeout - self.seconds)

    @property
    def pause(self) -> float:
        """Seconds until the next try is due."""
        return max(0.0, self._next_try - time.monotonic())

    @property
    def is_over(self) -> bool:
        """True if there is no time left for a further try."""
        if self._since is None:
            return False
        if self._stop_requested():
            self._stop_since = self._stop_since or time.monotonic()
            if time.monotonic() - self._stop_since >= STOP_SECONDS:
                return True
        return self.seconds >= self._timeout

    def fail(self) -> None:
        """Count a failed try; the first one begins the wait."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._pause = now, FIRST_PAUSE
        self._next_try = now + self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)

    def succeed(self) -> float:
        """End the wait; return how many seconds it took."""
        seconds = self.seconds
        self._since, self._next_try = None, 0.0
        return seconds
