"""The hosts of a run by ssh: those that take part, in the order of the nodes, and spare ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megalaunch.launchers.attached.node_counts import NodeCounts


class HostList:
    """Chooses hosts; nothing is connected here.

    Args:
        hosts: one for each node, then spare ones.
        nodes: number of nodes of the run.
        fewer: smaller numbers of nodes on which it may continue.
        first_stays: node 0 cannot be another host.

    Attributes:
        active: the host of each node.
    """

    def __init__(self, hosts: Sequence[str], nodes: int, fewer: Iterable[int] = (), first_stays: bool = False) -> None:
        self.active, self._spares = list(hosts[:nodes]), list(hosts[nodes:])
        self._counts = NodeCounts(nodes, fewer)
        self._first_stays = first_stays

    @property
    def spares(self) -> tuple[str, ...]:
        """The spare hosts, in the order in which they take places."""
        return tuple(self._spares)

    def can_replace(self, nodes: Sequence[int]) -> bool:
        """Return whether spare hosts can take the places of these nodes."""
        return len(nodes) <= len(self._spares) and not self._is_first_lost(nodes)

    def replace(self, node: int) -> str:
        """Let a spare host take the place of a node, for which there is one; return its name."""
        self.active[node] = self._spares.pop(0)
        return self.active[node]

    def put_last(self, host: str) -> None:
        """Let a spare host take the place of a node only after the other spare ones."""
        self._spares.sort(key=lambda spare: spare == host)

    def leave_out(self, nodes: Sequence[int]) -> bool:
        """Leave out the hosts of these nodes; False, and no change, if the run may not continue on what is left."""
        left = [host for node, host in enumerate(self.active) if node not in nodes] + self._spares
        size = self._counts.largest(len(left))
        if not size or self._is_first_lost(nodes):
            return False
        self.active, self._spares = left[:size], left[size:]
        return True

    def grows_by(self, hosts: int) -> bool:
        """Return whether the run would have more nodes with so many more hosts."""
        return self._counts.largest(len(self.active) + len(self._spares) + hosts) > len(self.active)

    def add(self, hosts: Sequence[str]) -> None:
        """Add hosts that are back: as many take part as the run may have, the others are spare."""
        every = [*self.active, *self._spares, *hosts]
        size = self._counts.largest(len(every))
        self.active, self._spares = every[:size], every[size:]

    def _is_first_lost(self, nodes: Sequence[int]) -> bool:
        return self._first_stays and 0 in nodes
