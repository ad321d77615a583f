"""The nodes that a run on fewer lacks: a request for them is pending in Ray while the run trains."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from megalaunch.launchers.launcher import Job
from megalaunch.launchers.ray.cluster import ids_of, release_nodes, request_nodes


class MissingNodes:
    """A request for more nodes, which Ray holds for the run once they are free; it also tells an autoscaler of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()  # `ask` may be in another thread than `close`
        self._is_closed = False
        self._group: Any = None
        self._ready: Any = None  # resolves once Ray holds the nodes

    @property
    def is_ready(self) -> bool:
        """Whether Ray holds the nodes for the run; the cluster is not asked."""
        import ray

        ready = self._ready
        return ready is not None and bool(ray.wait([ready], timeout=0)[0])

    def ask(self, count: int, without: Collection[str]) -> None:
        """Request so many nodes more, unless a request is pending; `without`: ids of nodes that are not taken."""
        if self._group is not None:
            return
        group = request_nodes(replace(self._job, nodes=count), without)
        with self._lock:
            if not self._is_closed:
                self._group, self._ready = group, group.ready()
                return
        release_nodes(group)  # the attempt that asked has ended since

    def found(self) -> list[str]:
        """Return the ids of the nodes that Ray holds for the run; none while it has fewer than were requested."""
        return ids_of(self._group) if self.is_ready else []

    def withdraw(self) -> None:
        """Give up the request, and the nodes that it holds."""
        with self._lock:
            group, self._group, self._ready = self._group, None, None
        if group is not None:
            release_nodes(group)

    def close(self) -> None:
        """Give up the request, also one that is being made."""
        with self._lock:
            self._is_closed = True
        self.withdraw()
