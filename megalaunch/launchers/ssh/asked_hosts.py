"""Hosts that take no part, and are asked whether they could."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from megalaunch.launchers.attached.job import end_nodes, start_failure
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.remote_agent import NodeOrder
from megalaunch.launchers.launcher import LauncherError


class AskedHosts:
    """Starts an agent on each host, which looks for the files of the run, and ends without a command.

    Args:
        connect: starts the agent on a host.
        order: names the files, and has no arguments.
    """

    def __init__(self, connect: Callable[[str], HeldNode], order: NodeOrder) -> None:
        self._connect, self._order = connect, order
        self._asked: dict[str, HeldNode] = {}
        self._ordered: set[str] = set()

    @property
    def waits(self) -> bool:
        """Whether a host has not answered yet."""
        return bool(self._asked)

    def ask(self, host: str) -> None:
        """Ask a host that is not being asked, without waiting for its answer."""
        if host not in self._asked:
            with suppress(LauncherError, OSError):  # no ssh any more, or a full disk: the next start names it
                self._asked[host] = self._connect(host)

    def answers(self) -> Iterator[tuple[str, NodeError | None]]:
        """Read what the hosts say; yield those that have answered, and why one cannot take part."""
        for host, node in list(self._asked.items()):
            over = node.ended
            node.poll()
            other = node.other_code() if "greeting" in node.said else None
            if other is not None:
                node.end_lease()
            elif "greeting" in node.said and host not in self._ordered:
                self._ordered.add(host)
                node.send(self._order)
            if over:
                node.wait()
                del self._asked[host]
                self._ordered.discard(host)
                yield host, other or start_failure(node, "exit", over)

    def close(self) -> None:
        """End the agents that have not answered."""
        end_nodes(list(self._asked.values()))
        self._asked.clear()
        self._ordered.clear()
