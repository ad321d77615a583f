"""Hosts that a run was left without: now and then they are asked whether they can take part again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from megalaunch.launchers.attached.job import end_nodes
from megalaunch.launchers.attached.node import HeldNode
from megalaunch.launchers.launcher import LauncherError

_RETURNS = 3  # of one host; one that is lost again and again would stop the run each time
_POLL_SECONDS = 0.1


class LostHosts:
    """Starts an agent on each lost host; one whose agent greets is back. The agent ends at once, without an order.

    Args:
        connect: starts the agent on a host.
    """

    def __init__(self, connect: Callable[[str], HeldNode]) -> None:
        self._connect = connect
        self._lost: list[str] = []
        self._times: Counter[str] = Counter()
        self._asked: dict[str, HeldNode] = {}
        self._back: list[str] = []

    def add(self, host: str) -> None:
        """Add a host that was lost; one that has come back _RETURNS times is not asked any more."""
        self._times[host] += 1
        if self._times[host] <= _RETURNS:
            self._lost.append(host)

    def ask(self) -> None:
        """Ask all lost hosts, without waiting for an answer."""
        for host in self._lost:
            if host not in self._asked:
                with suppress(LauncherError, OSError):  # no ssh any more, or a full disk: the next start names it
                    self._asked[host] = self._connect(host)

    def back(self) -> tuple[str, ...]:
        """Read the answers so far; return the hosts that are back."""
        for host, node in list(self._asked.items()):
            over = node.ended
            node.poll()
            if "greeting" in node.said:
                node.end_lease()
            if over:
                node.wait()
                del self._asked[host]
                if "greeting" in node.said and node.other_code() is None:
                    self._lost.remove(host)
                    self._back.append(host)
        return tuple(self._back)

    def take_back(self, seconds: float, given_up: Callable[[], bool]) -> tuple[str, ...]:
        """Ask all lost hosts, wait up to `seconds` for their answers, and remove the hosts that are back."""
        self.ask()
        deadline = time.monotonic() + seconds
        back = self.back()
        while self._asked and time.monotonic() < deadline and not given_up():
            time.sleep(_POLL_SECONDS)
            back = self.back()
        self._back.clear()
        return back

    def close(self) -> None:
        """End what asks the hosts."""
        end_nodes(list(self._asked.values()))
        self._asked.clear()
