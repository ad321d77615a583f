"""Python's garbage collector in the training loop: it runs between steps, on all ranks after the same ones.

Collected whenever enough objects exist, ranks would pause at different times, and each pause of one is a wait of all in
the next collective. A step leaves no tensors to the collector (tests/devices/test_host_syncs.py), so that memory does
not grow between its runs.
"""

from __future__ import annotations

import gc
from types import TracebackType

_INTERVAL = 50  # steps between collections, as in torchtitan
_YOUNG = 1  # the oldest generation collected: what survived a full collection rarely dies in a step


class StepGarbage:
    """Context of the training loop, in which garbage is collected by `collect_if_due` alone."""

    def __enter__(self) -> StepGarbage:
        """Collect what building the run left, and stop collecting."""
        gc.collect()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let Python collect by itself again."""
        gc.enable()

    def collect_if_due(self, step: int) -> None:
        """Collect young garbage after every fiftieth step."""
        if step % _INTERVAL == 0:
            gc.collect(_YOUNG)
