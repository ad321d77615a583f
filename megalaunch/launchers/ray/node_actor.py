"""Run the agent of one node in an actor of Ray: the agent's stdin, its lease, ends with the actor."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

_AGENT = "megalaunch.launchers.attached.remote_agent"
_CLOSE_SECONDS = 8.0  # the agent kills what it has started in five


class NodeActor:
    """The process of the agent; its records and its exit code go to who holds the node."""

    def __init__(self, python: str | None, log: str) -> None:
        """Start nothing yet; messages of the agent and those of its command are appended to `log`.

        The first exchange starts the agent, and its lease: actors of other nodes may need longer to start than that.
        """
        self._python, self._log = python or sys.executable, Path(log)
        self._agent: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, int]:
        """Return the address of this node in the cluster, and the first of two free ports."""
        import ray.util

        while True:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("", 0))
                port = int(first.getsockname()[1])
                try:
                    second.bind(("", port + 1))
                except (OSError, OverflowError):
                    continue
                return ray.util.get_node_ip_address(), port

    def exchange(self, data: bytes, seconds: float) -> tuple[bytes, int | None]:
        """Send bytes to the agent, wait up to `seconds` for its records, and return them and its exit code."""
        agent = self._agent = self._agent or self._start()
        assert agent.stdin is not None, "stdin is a pipe"
        assert agent.stdout is not None, "stdout is a pipe"
        with contextlib.suppress(OSError):  # it has ended
            agent.stdin.write(data)
        code = agent.poll()  # asked first, so that its last records are read
        if code is None and not select.select([agent.stdout], [], [], seconds)[0]:
            return b"", None
        read = b""
        while select.select([agent.stdout], [], [], 0)[0] and (block := os.read(agent.stdout.fileno(), 1 << 16)):
            read += block
        return read, code

    def close(self) -> int | None:
        """End the lease; return the agent's exit code, None if it does not end or was not started."""
        if self._agent is None:
            return None
        assert self._agent.stdin is not None, "stdin is a pipe"
        self._agent.stdin.close()
        try:
            return self._agent.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [self._python, "-m", _AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0
            )
