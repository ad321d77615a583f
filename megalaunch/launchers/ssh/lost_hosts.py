"""Hosts that a run was left without: now and then they are asked whether they can take part again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from megalaunch.launchers.attached.node import HeldNode
from megalaunch.launchers.attached.node_counts import MOST_RETURNS
from megalaunch.launchers.attached.remote_agent import NodeOrder
from megalaunch.launchers.ssh.asked_hosts import AskedHosts

_POLL_SECONDS = 0.1


class LostHosts:
    """Asks lost hosts; one is back if it could take part again.

    Args:
        connect: starts an agent on a host.
        order: of an agent that only checks its host.
    """

    def __init__(self, connect: Callable[[str], HeldNode], order: NodeOrder) -> None:
        self._asked = AskedHosts(connect, order)
        self._lost: list[str] = []
        self._times: Counter[str] = Counter()
        self._back: list[str] = []

    def add(self, host: str) -> None:
        """Add a host that was lost; one that has come back MOST_RETURNS times is not asked any more."""
        self._times[host] += 1
        if self._times[host] <= MOST_RETURNS:
            self._lost.append(host)

    def ask(self) -> None:
        """Ask all lost hosts, without waiting for an answer."""
        for host in self._lost:
            self._asked.ask(host)

    def back(self) -> tuple[str, ...]:
        """Read the answers so far; return the hosts that are back."""
        for host, error in self._asked.answers():
            if error is None:
                self._lost.remove(host)
                self._back.append(host)
        return tuple(self._back)

    def take_back(self, seconds: float, given_up: Callable[[], bool]) -> tuple[str, ...]:
        """Ask all lost hosts, wait up to `seconds` for their answers, and remove the hosts that are back."""
        self.ask()
        deadline = time.monotonic() + seconds
        back = self.back()
        while self._asked.waits and time.monotonic() < deadline and not given_up():
            time.sleep(_POLL_SECONDS)
            back = self.back()
        self._back.clear()
        return back

    def close(self) -> None:
        """End what asks the hosts."""
        self._asked.close()
