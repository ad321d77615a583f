"""The line of a running phase: redrawn in a terminal, printed once elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from megalaunch.format.numbers import format_duration
from megalaunch.launch.run_state import RunState

_CLEAR = "\r\033[K"
_INTERVAL = 0.5  # seconds between two updates


class PhaseLine:
    """One line a phase: what it does now, then what it proved. Also the display of a phase's launch."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._began = time.monotonic()
        self._shown = float("-inf")

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self._began

    def say(self, line: str) -> None:
        """Drop a line of the launcher: events.jsonl has it, and a failure is reported at the end."""

    def show(self, text: str) -> None:
        """Replace the line in a terminal."""
        if self._terminal and time.monotonic() - self._shown >= _INTERVAL:
            self._shown = time.monotonic()
            self._write(f"{_CLEAR}  {self._name:<14}{text}, {format_duration(self.seconds)}\r")

    def update(self, view: RunState) -> None:
        """Show the step or the phase of the workers."""
        self.show(f"step {view.step} of {view.last_step}" if view.stepping else view.phase)

    def close(self) -> None:
        """Remove the line of the running phase."""
        if self._terminal:
            self._write(_CLEAR)

    def finish(self, text: str) -> None:
        """Print the line that stays."""
        self.close()
        self._write(f"  {self._name:<14}{format_duration(self.seconds):>11}  {text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
