"""Print a line every few seconds while a long operation prints nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from megalaunch.format.numbers import format_duration

INTERVAL = 9.0


class Heartbeat:
    """A context whose `say` prints a line, and repeats the current operation after INTERVAL seconds without output."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._print = say
        self._operation, self._since = "working", time.monotonic()
        self._last = self._since
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def say(self, line: str) -> None:
        """Print a line; it names the current operation from now on."""
        self._operation = line
        self._since = self._last = time.monotonic()
        self._print(line)

    def _repeat(self) -> None:
        while not self._over.wait(0.2):
            now = time.monotonic()
            if now - self._last >= INTERVAL:
                self._last = now
                self._print(f"  still running, {format_duration(now - self._since)}: {self._operation}")
