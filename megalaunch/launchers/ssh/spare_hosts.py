"""Spare hosts: each is checked when the run starts, so that one that cannot take part is known before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megalaunch.launchers.attached.node import HeldNode
from megalaunch.launchers.attached.remote_agent import NodeOrder
from megalaunch.launchers.ssh.asked_hosts import AskedHosts


class SpareHosts:
    """Checks spare hosts while the run starts, which does not wait for them.

    Args:
        connect: starts an agent on a host.
        order: of an agent that only checks its host.
        failed: called with a host that could take no part, and a warning that names it with the fix.
    """

    def __init__(
        self, connect: Callable[[str], HeldNode], order: NodeOrder, failed: Callable[[str, str], None]
    ) -> None:
        self._asked, self._failed = AskedHosts(connect, order), failed

    def check(self, hosts: Iterable[str]) -> None:
        """Begin to check these hosts."""
        for host in hosts:
            self._asked.ask(host)

    def poll(self) -> None:
        """Read the answers so far."""
        for host, error in self._asked.answers():
            if error is not None:
                fix = f": {error.fix}" if error.fix else ""
                self._failed(host, f"warning: the spare host {error.of_host(host)}{fix}")

    def close(self) -> None:
        """End the checks that are not over."""
        self._asked.close()
