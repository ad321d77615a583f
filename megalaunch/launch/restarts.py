"""How often a launch restarts its workers, and after what delay."""

from __future__ import annotations

LONGEST_PAUSE = 300.0


class RestartBudget:
    """At most `max_restarts` restarts in a row; each new checkpoint resets the count.

    The first restart is immediate, since most faults occur once. The second waits `backoff` seconds, and each further
    one twice as long as the one before, up to LONGEST_PAUSE, since a fault of the machine may pass.
    """

    def __init__(self, max_restarts: int, backoff: float, saved_step: int = 0) -> None:
        self._max, self._backoff, self._saved_step = max_restarts, backoff, saved_step
        self.used = 0

    def checkpoint_saved(self, step: int) -> None:
        """Reset the count after a checkpoint of a new step; a checkpoint of an earlier step is no progress."""
        if step > self._saved_step:
            self._saved_step, self.used = step, 0

    def take(self) -> float | None:
        """Use one restart: return the seconds to wait before it, or None when none is left."""
        if self.used >= self._max:
            return None
        pause = 0.0 if self.used == 0 else min(LONGEST_PAUSE, self._backoff * 2.0 ** (self.used - 1))
        self.used += 1
        return pause
