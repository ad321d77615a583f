"""A node as the process that holds it sees it: what its agent says, and a lease on it, over any connection."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from megalaunch.launchers.attached.remote_agent import STOP, NodeOrder, greeting
from megalaunch.launchers.launcher import LauncherError


class NodeError(LauncherError):
    """A node cannot be started; the message begins with its number and host.

    Attributes:
        node: its number.
    """

    def __init__(self, node: int, host: str, message: str, fix: str = "") -> None:
        super().__init__(f"node {node} ({host}) {message}", fix)
        self.node = node


class HeldNode(ABC):
    """One node; everything that its agent said is in `said`, by the name of the record."""

    def __init__(self, node: int, host: str) -> None:
        self.node, self.host = node, host
        self.said: dict[str, Any] = {}
        self._rest = b""

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether nothing more comes from the node."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command, negative for a signal; None: it runs, or its host was lost."""
        return self.said.get("exit")

    @abstractmethod
    def poll(self) -> None:
        """Renew the lease, and read what the agent has said."""

    def send(self, order: NodeOrder) -> None:
        """Send the order of the node."""
        self._write(order.to_line())

    def stop(self) -> None:
        """Ask the workers of the node to save and end."""
        self._write(STOP + b"\n")

    @abstractmethod
    def end_lease(self) -> None:
        """Let the agent kill all that it has started; `wait` waits for that."""

    @abstractmethod
    def wait(self) -> bool:
        """End the connection; return whether the agent has ended, and with it all that it had started."""

    @abstractmethod
    def failure(self) -> NodeError:
        """Return why the connection ended before the agent has said anything."""

    def require_same_code(self) -> None:
        """Raise NodeError unless the host has the Python and the megalaunch of this machine."""
        there, here = self.said["greeting"], greeting()
        different = [
            f"{name} {there.get(name)} in place of {here[name]}" for name in here if there.get(name) != here[name]
        ]
        if different:
            fix = "install the same there, or name its path in launcher.python"
            raise self.error(f"has {' and '.join(different)}", fix)

    def error(self, message: str, fix: str = "") -> NodeError:
        """Return an error of this node."""
        return NodeError(self.node, self.host, message, fix)

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Send bytes to the agent; one that has ended is told by `ended`."""

    def _read(self, data: bytes) -> None:
        """Keep the records among these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a greeting of the login shell
                record = json.loads(line)
                self.said.update(record if isinstance(record, dict) else {})
