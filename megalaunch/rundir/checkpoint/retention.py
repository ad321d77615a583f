"""The retention rule of a run's checkpoints, shared by pruning and listing."""

from __future__ import annotations

from collections.abc import Iterable


def retention_reasons(steps: Iterable[int], keep_last: int, keep_every: int) -> dict[int, str]:
    """Return the reason for which each step's checkpoint is kept. Steps that the next save removes have no entry.

    The newest `keep_last` are kept (0: all), and those of every `keep_every`-th step (0: no such steps).
    """
    reasons = {}
    for place, step in enumerate(sorted(steps, reverse=True)):
        if keep_last == 0:
            reasons[step] = "all are kept"
        elif keep_every and step % keep_every == 0:
            reasons[step] = f"every {keep_every} steps"
        elif place < keep_last:
            reasons[step] = "newest" if keep_last == 1 else f"one of the newest {keep_last}"
    return reasons
