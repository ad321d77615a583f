"""A pod as a node of a run: both ends of the connection over which its agent gets its lease and tells its records."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from megalaunch.launchers.attached import remote_agent
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.remote_agent import AGENT_CODES, BEAT_SECONDS
from megalaunch.launchers.kubernetes.pod_channel import Host, Pod, connect, send_record

_CLOSE_SECONDS = 8.0  # the agent kills what it has started in five
_POLL_SECONDS = 0.1
_LEAVING, _AGENT_CODE = "leaving", "agent"  # records of a pod, besides those of its agent


class PodNode(HeldNode):
    """One node, as the pod that holds the run sees it; the connection does not block."""

    def __init__(self, node: int, pod: Pod, connection: socket.socket) -> None:
        super().__init__(node, pod.node)
        self._connection, self._beat, self._over = connection, float("-inf"), False

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the node."""
        return "exit" in self.said or self._over

    @property
    def leaves(self) -> bool:
        """Whether its pod was told to end."""
        return _LEAVING in self.said

    def poll(self) -> None:
        """Renew the lease, and read what the agent has said."""
        if not self.ended and time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            self._write(b"\n")
        self._receive()

    def _receive(self) -> None:
        try:
            while not self._over:
                data = self._connection.recv(1 << 16)
                self._over = not data
                self._read(data)
        except BlockingIOError:
            return
        except OSError:  # its machine is gone
            self._over = True

    def end_lease(self) -> None:
        """Let the agent kill all that it has started; `wait` waits for that."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def wait(self) -> bool:
        """End the connection; return whether the agent has ended, and with it all that it had started."""
        self.end_lease()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not self._over and time.monotonic() < deadline:
            select.select([self._connection], [], [], _POLL_SECONDS)
            self._receive()
        self._over = True
        self._connection.close()
        return self.said.get(_AGENT_CODE) in AGENT_CODES

    def failure(self) -> NodeError:
        """Return that the connection ended before the agent has said anything."""
        return self.error("did not start: its pod has ended", "`kubectl logs` of the pod shows why")

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # the pod is gone, which `ended` tells
            self._connection.sendall(data)


class Member:
    """This pod as a node: it waits for the pod that holds the run, and runs the agent that this starts.

    Args:
        leaves: whether this pod was told to end.
    """

    def __init__(self, pod: Pod, leaves: Callable[[], bool]) -> None:
        self._pod, self._leaves = pod, leaves

    def serve(self, host: Host) -> None:
        """Take part in at most one attempt; nothing of it is left. Raises OSError if the pod is not reached."""
        with connect(host, self._pod) as connection:
            if not self._is_wanted(connection):
                return
            command = [sys.executable, "-m", remote_agent.__name__]
            agent = subprocess.Popen(command, stdin=connection.fileno(), stdout=connection.fileno())
            told = False
            while agent.poll() is None:
                if self._leaves() and not told:
                    told = True
                    with suppress(OSError):  # the holder is gone, and the agent ends
                        send_record(connection, **{_LEAVING: True})
                time.sleep(_POLL_SECONDS)
            with suppress(OSError):
                send_record(connection, **{_AGENT_CODE: agent.returncode})

    def _is_wanted(self, connection: socket.socket) -> bool:
        """Wait until the holder sends something, which it does to the pods that it takes; False: it has ended."""
        while not self._leaves():
            if select.select([connection], [], [], _POLL_SECONDS)[0]:
                try:
                    return bool(connection.recv(1, socket.MSG_PEEK))
                except OSError:
                    return False
        return False
