"""Run the command of one node on a host; ssh or an actor of Ray starts this there, and all that it needs is on stdin.

Standard input is a lease: when it ends, or is silent for LEASE_SECONDS, the command and all that it started are
killed. Standard output has records alone, one line of JSON each; the output of the command goes to standard error.
The order: a greeting, the order as one line of stdin, `started` or `refused`, and `exit` with the command's exit code,
which ssh itself cannot tell (255 may be its own, and stands for every signal).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalaunch.launch.agent import Agent
from megalaunch.process import send_signal
from megalaunch.version import __version__

LEASE_SECONDS = 15.0
BEAT_SECONDS = 2.0  # between two lines of the client
STOP = b"stop"
AGENT_CODES = (0, 1)  # of this program at its end; ssh has 255 where the connection or this program was lost
_SHARE_SECONDS = 8.0  # a network file system caches the absence of a file
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class NodeOrder:
    """What one node runs.

    Attributes:
        arguments: of `megalaunch`; none: only check the host.
        environment: variables added to those of the host.
        working_directory: absolute.
        shared_file: a file of the run directory, absolute.
        shared_text: its text, if the directory is that of the other nodes.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str
    shared_file: str
    shared_text: str

    def to_line(self) -> bytes:
        """Return the order as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def greeting() -> dict[str, str]:
    """Return what must be the same on all nodes."""
    return {"python": ".".join(map(str, sys.version_info[:2])), "megalaunch": __version__}


class Lease:
    """Standard input: lines of the client, and the proof that it lives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest, self._heard = descriptor, b"", time.monotonic()
        self.ended = False

    def lines(self, seconds: float) -> Iterator[bytes]:
        """Wait up to `seconds` for lines, and yield those that are complete; blank ones only renew the lease."""
        if select.select([self._descriptor], [], [], seconds)[0]:
            read = os.read(self._descriptor, 1 << 16)
            self.ended = not read
            self._heard = time.monotonic()
            *complete, self._rest = (self._rest + read).split(b"\n")
            yield from filter(None, complete)
        self.ended |= time.monotonic() - self._heard > LEASE_SECONDS


def main() -> int:
    """Run the command of this node; return 0 if its exit code was told."""
    records = os.dup(1)
    os.dup2(2, 1)

    def tell(**record: Any) -> None:
        os.write(records, json.dumps(record).encode() + b"\n")

    tell(greeting=greeting(), host=socket.gethostname())
    lease = Lease(0)
    order = _read_order(lease)
    if order is None:
        return 1
    reason = _refusal(order)
    if reason is not None:
        tell(refused=reason)
        return 1
    if not order.arguments:
        tell(exit=0)
        return 0
    os.chdir(order.working_directory)
    command = [sys.executable, "-m", "megalaunch", *order.arguments]
    agent = Agent(command, {**os.environ, **order.environment}, None)
    tell(started=agent.process.pid)
    try:
        code = _watch(agent, lease)
    finally:
        agent.kill_tree()
    if code is None:
        return 1
    tell(exit=code)
    return 0


def _read_order(lease: Lease) -> NodeOrder | None:
    while not lease.ended:
        for line in lease.lines(_POLL_SECONDS):
            return NodeOrder(**json.loads(line))
    return None


def _refusal(order: NodeOrder) -> str | None:
    """Return why the command cannot run here; None if it can."""
    if not Path(order.working_directory).is_dir():
        return f"has no directory {order.working_directory}, in which the command was typed"
    shared, deadline = Path(order.shared_file), time.monotonic() + _SHARE_SECONDS
    while True:
        try:
            if shared.read_text(encoding="utf-8") == order.shared_text:
                return None
        except OSError:
            pass
        if not shared.parent.is_dir() or time.monotonic() > deadline:
            return f"does not share the run directory {shared.parent}"
        time.sleep(_POLL_SECONDS)


def _watch(agent: Agent, lease: Lease) -> int | None:
    """Return the exit code of the command, negative for a signal; None if the lease has ended."""
    while (code := agent.poll()) is None:
        for line in lease.lines(_POLL_SECONDS):
            if line == STOP:
                send_signal(agent.process, signal.SIGTERM)
        if lease.ended:
            return None
    return code


if __name__ == "__main__":
    sys.exit(main())
