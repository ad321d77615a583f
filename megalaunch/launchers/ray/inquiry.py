"""Ask the Ray cluster on a thread of its own: while it does not answer, the leases of the nodes are still renewed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Inquiry:
    """One question at a time; its answer is a text, "" for none."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._answer = ""

    @property
    def is_idle(self) -> bool:
        """Whether no question waits for its answer."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, ask: Callable[[], str]) -> bool:
        """Ask, unless the last question has no answer yet, and return whether it did; `ask` must not raise."""
        if not self.is_idle:
            return False

        def run() -> None:
            self._answer = ask()

        self._thread = threading.Thread(target=run, name="ray inquiry", daemon=True)
        self._thread.start()
        return True

    def take(self) -> str:
        """Return the answer to the last question, once; "" while there is none."""
        if not self.is_idle:
            return ""
        answer, self._answer = self._answer, ""
        return answer
