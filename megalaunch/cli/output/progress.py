"""The progress line of a long command, on standard error: redrawn in place in a terminal.

rich's Progress redraws from a thread, which a command that forks workers must not have, and costs 0.1 s to import.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_INTERVAL = 0.5  # seconds between two updates
_CLEAR = "\r\033[K"


class ProgressLine:
    """One line that replaces itself in a terminal; elsewhere a line every `log_interval` seconds, or none.

    Args:
        interval: seconds between two updates in a terminal.
        log_interval: seconds between two lines elsewhere; None: print nothing.
    """

    def __init__(self, interval: float = _INTERVAL, log_interval: float | None = None) -> None:
        self._terminal = sys.stderr.isatty()
        self._interval = interval if self._terminal else log_interval
        self._shown = time.monotonic()

    @property
    def due(self) -> bool:
        """True when the interval has passed since the last update, or since the start."""
        return self._interval is not None and time.monotonic() - self._shown >= self._interval

    def show(self, text: str) -> None:
        """Replace the line in a terminal, print it elsewhere; the next output overwrites it."""
        self._shown = time.monotonic()
        if self._interval is not None:
            self._write(f"{_CLEAR}{text}\r" if self._terminal else f"{text}\n")

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._terminal:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def percent_progress(task: str, after: str = "", interval: float = _INTERVAL) -> Callable[[int, int], None]:
    """Return a function of (done, total) that shows `task: 40%` in a terminal, and `after` when all is done."""
    line = ProgressLine(interval)

    def show(done: int, total: int) -> None:
        if done >= total:
            line.show(after) if after else line.clear()
        elif line.due:
            line.show(f"{task}: {done / max(1, total):4.0%}")

    return show
