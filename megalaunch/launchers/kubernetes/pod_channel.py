"""Authenticated connections between the pods of a run that may have fewer: one holds the run, and each takes part.

host.json in the run directory says where the holder listens, and has the secret that both sides prove to hold. Traffic
is not encrypted, as that of the agents is not.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalaunch.fs import PRIVATE_MODE, open_file, write_file_atomically
from megalaunch.rundir.rendezvous import prove

_ANSWER_SECONDS = 5.0
_VANISHED_MILLISECONDS = 10_000  # a peer whose machine acknowledges nothing for so long is gone
_LINE = 1024  # bytes of a line of the handshake, at most


@dataclass(frozen=True)
class Host:
    """The pod that holds the run.

    Attributes:
        exit_code: of the run, once this pod holds it no more; None: it does, or it was lost.
    """

    address: str
    port: int
    secret: str
    exit_code: int | None = None


@dataclass(frozen=True)
class Pod:
    """A pod that can take part.

    Attributes:
        index: in its job.
        node: name of its node.
        address: at which other pods reach it.
    """

    index: int
    node: str
    address: str


def write_host(path: Path, host: Host) -> None:
    """Write the holder of a run. Raises OSError."""
    write_file_atomically(path, json.dumps(asdict(host)), PRIVATE_MODE)


def read_host(path: Path) -> Host | None:
    """Return the newest holder of a run; None without one."""
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), encoding="utf-8") as file:
            return Host(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def connect(host: Host, pod: Pod) -> socket.socket:
    """Connect to the holder of a run, and authenticate both sides. Raises OSError."""
    source = (pod.address, 0)
    connection = socket.create_connection((host.address, host.port), _ANSWER_SECONDS, source_address=source)
    try:
        _notice_vanished_peer(connection)
        mine, theirs = secrets.token_hex(16), _receive_line(connection)
        claim = [str(pod.index), pod.node, pod.address]
        proof = prove(host.secret, "pod", theirs, mine, *claim)
        send_record(connection, pod=asdict(pod), nonce=mine, proof=proof)
        if not hmac.compare_digest(_receive_line(connection), prove(host.secret, "host", mine, theirs)):
            raise ConnectionRefusedError("another program listens in the place of the pod that holds the run")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def admit(connection: socket.socket, secret: str) -> Pod:
    """Authenticate both sides of an incoming connection; return the pod. Raises OSError, ValueError."""
    connection.settimeout(_ANSWER_SECONDS)
    _notice_vanished_peer(connection)
    mine = secrets.token_hex(16)
    connection.sendall(f"{mine}\n".encode())
    try:
        hello = json.loads(_receive_line(connection))
        pod, theirs, proof = Pod(**hello["pod"]), str(hello["nonce"]), str(hello["proof"])
    except (TypeError, KeyError) as error:
        raise ValueError("no greeting of a pod") from error
    if not hmac.compare_digest(proof, prove(secret, "pod", mine, theirs, str(pod.index), pod.node, pod.address)):
        raise ValueError("a pod without the secret of the run")
    connection.sendall(f"{prove(secret, 'host', theirs, mine)}\n".encode())
    return pod


def send_record(connection: socket.socket, **record: Any) -> None:
    """Send a record as a line of JSON. Raises OSError."""
    connection.sendall(json.dumps(record).encode() + b"\n")


def _receive_line(connection: socket.socket) -> str:
    """Receive one line of the handshake, and nothing after it. Raises OSError."""
    text = b""
    while not text.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(text) > _LINE:
            raise ConnectionResetError("no line of a handshake")
        text += byte
    return text.decode(errors="replace").rstrip("\n")


def _notice_vanished_peer(connection: socket.socket) -> None:
    """Let the system notice a peer whose machine is gone, both while lines are sent to it and while none are."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_USER_TIMEOUT", _VANISHED_MILLISECONDS)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
