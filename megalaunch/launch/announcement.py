"""Announce a launch: node 0 tells the launchers of the other nodes that it prepares a run, and when the run is ready.

Node 0 answers every connection with one line: the id of the launch, the SHA-256 of spec.yaml once it is written, and
the versions of its software. None is secret. The agents authenticate each other later, by the secret in
rendezvous.json.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import threading
from dataclasses import astuple, dataclass
from types import TracebackType

from megalaunch.launch.directory import RunDirectoryError
from megalaunch.platform.allocation import NodePlace
from megalaunch.platform.software import Software
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.rendezvous import CredentialsError, read_credentials, renew_credentials

_LINE = re.compile(r"megalaunch-launch ([0-9a-f]{64}) ([0-9a-f]{64}|-) ([0-9a-f]{12}) (\S{1,40}) (\S{1,40})\n")
_MAX_BYTES = 512


@dataclass(frozen=True)
class Announced:
    """The line of node 0.

    Attributes:
        launch_id: the id of its launch.
        spec: the SHA-256 of its spec.yaml; None: not written yet.
        software: its versions; None: no answer in time.
    """

    launch_id: str
    spec: str | None
    software: Software | None = None


class NotAnnounced(Exception):
    """Another program answers in the place of node 0."""


class Announcement:
    """Announce a launch on node 0 until it is closed. Renews the credentials of the run directory.

    Raises:
        RunDirectoryError: the credentials cannot be written, or the address cannot be used.
    """

    def __init__(self, place: NodePlace, directory: RunDirectory) -> None:
        self._directory = directory
        self._listener = _listen(place)
        try:
            renew_credentials(directory.rendezvous)
        except OSError as error:
            self._listener.close()
            message = f"{directory.rendezvous} cannot be written ({error.strerror})"
            raise RunDirectoryError(message, "name another run.directory") from error
        self._software = " ".join(astuple(Software.of_this_node()))
        self._spec, self._launch_id = "-", launch_id(directory)
        threading.Thread(target=self._answer, name="announcement", daemon=True).start()

    def __enter__(self) -> Announcement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with contextlib.suppress(OSError):
            self._directory.rendezvous.unlink(missing_ok=True)

    def run_is_ready(self) -> None:
        """Tell the other nodes that the run directory is complete."""
        self._spec = str(spec_hash(self._directory))

    def _line(self) -> bytes:
        return f"megalaunch-launch {self._launch_id} {self._spec} {self._software}\n".encode()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(self._line())


def _listen(place: NodePlace) -> socket.socket:
    """Listen on node 0's own address only. Raises RunDirectoryError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(place.first_node, place.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        fix = "set MASTER_ADDR on every node to an address of node 0"
        if error.errno == errno.EADDRINUSE:
            fix = "end the program that uses the port, or set another MASTER_PORT on every node"
        reason = error.strerror or os.strerror(error.errno or 0)
        raise RunDirectoryError(f"node 0 cannot listen on {place} ({reason})", fix) from error
    return listener


def read_announcement(place: NodePlace, timeout: float) -> Announced:
    """Ask node 0 for its announcement.

    Raises:
        OSError: no connection or no answer.
        NotAnnounced: the answer is not that of a launcher.
    """
    with socket.create_connection((place.first_node, place.port), timeout) as connection:
        text = b""
        while len(text) < _MAX_BYTES and not text.endswith(b"\n") and (block := connection.recv(_MAX_BYTES)):
            text += block
    match = _LINE.fullmatch(text.decode("ascii", errors="replace"))
    if match is None:
        raise NotAnnounced
    return Announced(match[1], None if match[2] == "-" else match[2], Software(match[3], match[4], match[5]))


def launch_id(directory: RunDirectory) -> str | None:
    """Return the id of the launch whose credentials the run directory holds; None without them."""
    try:
        return hashlib.sha256(read_credentials(directory.rendezvous).run_id.encode()).hexdigest()
    except CredentialsError:
        return None


def spec_hash(directory: RunDirectory) -> str | None:
    """Return the SHA-256 of spec.yaml; None without it."""
    try:
        return hashlib.sha256(directory.spec.read_bytes()).hexdigest()
    except OSError:
        return None
