"""The nodes that a run on fewer lacks: a request for them is pending in Ray while the run trains."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from megalaunch.launchers.launcher import Job
from megalaunch.launchers.ray.cluster import ids_of, release_nodes, request_nodes


class MissingNodes:
    """A request for more nodes, which Ray holds for the run once they are free; it also tells an autoscaler of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: Any = None
        self._ready: Any = None  # resolves once Ray holds the nodes

    def ask(self, count: int, without: Collection[str]) -> None:
        """Request so many nodes more, unless a request is pending; `without`: ids of nodes that are not taken."""
        if self._group is None:
            self._group = request_nodes(replace(self._job, nodes=count), without)
            self._ready = self._group.ready()

    def found(self) -> list[str]:
        """Return the ids of the nodes that Ray holds for the run; none while it has fewer than were requested.

        Leases are renewed between two calls, so that it does not wait for the cluster until the nodes are there.
        """
        import ray

        if self._group is None or not ray.wait([self._ready], timeout=0)[0]:
            return []
        return ids_of(self._group)

    def withdraw(self) -> None:
        """Give up the request, and the nodes that it holds."""
        if self._group is not None:
            release_nodes(self._group)
            self._group = self._ready = None
