"""The numbers of nodes that a job may have: all that it wants, or fewer after it has lost some."""

from __future__ import annotations

from collections.abc import Iterable

MOST_RETURNS = 3  # of one host to a job; one that is lost again and again would stop the run each time


class NodeCounts:
    """Chooses among the numbers of nodes of a job.

    Args:
        nodes: that the job wants.
        fewer: smaller numbers on which it may continue.

    Attributes:
        descending: all numbers, the largest first.
    """

    def __init__(self, nodes: int, fewer: Iterable[int] = ()) -> None:
        self.descending = sorted({nodes, *fewer}, reverse=True)

    def largest(self, within: int) -> int:
        """Return the largest number that is not above another; 0: there is none."""
        return next((count for count in self.descending if count <= within), 0)

    def next_above(self, nodes: int) -> int:
        """Return the smallest number above another, which is below the largest."""
        return next(count for count in reversed(self.descending) if count > nodes)
