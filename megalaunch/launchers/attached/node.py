"""A node as the process that holds it sees it: what its agent says, and a lease on it, over any connection."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megalaunch.launchers.attached.remote_agent import STOP, NodeOrder, greeting
from megalaunch.launchers.launcher import LauncherError

_MOST_NAMED = 8


class NodeError(LauncherError):
    """Nodes cannot be started; the message names each by its number and host.

    Attributes:
        nodes: their numbers.
    """

    def __init__(self, message: str, fix: str, nodes: tuple[int, ...]) -> None:
        super().__init__(message, fix)
        self.nodes = nodes

    def of_host(self, host: str) -> str:
        """Return the message of one node with its host alone, for a host that is no node of the run."""
        return f"{host}{str(self).partition(f'({host})')[2]}"


def join_errors(errors: Sequence[NodeError], number_of_nodes: int) -> NodeError:
    """Return one error for those of several nodes, in the order of the nodes."""
    errors = sorted(errors, key=lambda error: error.nodes)
    if len(errors) == 1:
        return errors[0]
    shown = [str(error) for error in errors[:_MOST_NAMED]]
    if len(errors) > _MOST_NAMED:
        shown.append(f"and {len(errors) - _MOST_NAMED} more")
    fixes = dict.fromkeys(error.fix for error in errors[:_MOST_NAMED] if error.fix)
    message = f"{len(errors)} of {number_of_nodes} nodes do not start: {'; '.join(shown)}"
    return NodeError(message, "; ".join(fixes), tuple(node for error in errors for node in error.nodes))


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

    def other_code(self) -> NodeError | None:
        """Return an error unless the host has the Python and the megalaunch of this machine."""
        there, here = self.said["greeting"], greeting()
        different = [
            f"{name} {there.get(name)} in place of {here[name]}" for name in here if there.get(name) != here[name]
        ]
        fix = "install the same there, or name its path in launcher.python"
        return self.error(f"has {' and '.join(different)}", fix) if different else None

    def error(self, message: str, fix: str = "") -> NodeError:
        """Return an error of this node."""
        return NodeError(f"{self} {message}", fix, (self.node,))

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
