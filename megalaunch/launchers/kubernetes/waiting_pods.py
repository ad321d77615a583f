"""The pods that wait to take part: each keeps a connection to the pod that holds the run."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType

from megalaunch.launchers.kubernetes.pod_channel import Host, Pod, admit

_BACKLOG = 1024  # all pods come at once


class WaitingPods:
    """Listens for pods until it is closed. Raises OSError where the address cannot be used."""

    def __init__(self, host: Host) -> None:
        family = socket.AF_INET6 if ":" in host.address else socket.AF_INET
        self._secret = host.secret
        self._listener = socket.create_server((host.address, host.port), family=family, backlog=_BACKLOG)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Pod, socket.socket]] = {}
        threading.Thread(target=self._listen, name="pods", daemon=True).start()

    def __enter__(self) -> WaitingPods:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            for _, connection in self._waiting.values():
                connection.close()
            self._waiting.clear()

    def pods(self) -> list[Pod]:
        """Return the pods that wait, in the order of their indexes."""
        with self._lock:
            for index, (_, connection) in list(self._waiting.items()):
                if _is_gone(connection):
                    connection.close()
                    del self._waiting[index]
            return [self._waiting[index][0] for index in sorted(self._waiting)]

    def take(self, pod: Pod) -> socket.socket | None:
        """Return the connection of a pod, which waits no more; None: it is gone."""
        with self._lock:
            _, connection = self._waiting.pop(pod.index, (pod, None))
        return connection

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            pod = admit(connection, self._secret)
        except (OSError, ValueError):
            connection.close()
            return
        connection.setblocking(False)
        with self._lock:
            _, old = self._waiting.pop(pod.index, (pod, None))
            self._waiting[pod.index] = pod, connection
        if old is not None:  # of an earlier pod of this index
            old.close()


def _is_gone(connection: socket.socket) -> bool:
    """Return whether a pod has closed its connection: one that waits says nothing."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
