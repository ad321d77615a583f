"""Authenticated connections between the agents of a run: both sides prove that they hold the run's shared secret.

The proofs are HMAC-SHA256 over both sides' nonces (RFC 2104): a stranger learns nothing from them. The server proves
itself first, so that the client detects a wrong server before it sends its own proof. Traffic is not encrypted: the
network between the nodes must be private.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import socket
from typing import Any, Literal

from megalaunch.rundir.rendezvous import prove

Purpose = Literal["agent", "store"]
Message = dict[str, Any]

HANDSHAKE_SECONDS = 5.0
GREETING = "megalaunch/1"
_LIMIT = 2**16  # maximum bytes of a line
_BLOCK = 2**16
_HANDSHAKE_LINE = 256
_FIELDS = re.compile(rb"[!-~]+( [!-~]+)*")


class PeerError(Exception):
    """The peer is another program, or has another secret."""


class Connection:
    """A line-based connection: space-separated fields during the handshake, one JSON object per line after it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        enable_keepalive(writer.get_extra_info("socket"))

    async def receive(self) -> Message:
        """Receive a JSON message, after the handshake; raises PeerError, or EOFError at the end."""
        try:
            message = json.loads(await self.receive_line())
        except ValueError as error:
            raise PeerError from error
        if not isinstance(message, dict):
            raise PeerError
        return message

    async def receive_line(self) -> bytes:
        """Receive one line, without the newline; raises PeerError or EOFError."""
        try:
            return (await self.reader.readuntil(b"\n"))[:-1]
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise PeerError from error
            raise EOFError from error
        except asyncio.LimitOverrunError as error:
            raise PeerError from error

    async def send_fields(self, *fields: str) -> None:
        """Send one line of fields during the handshake; raises OSError."""
        self.writer.write(" ".join(fields).encode() + b"\n")
        await self.writer.drain()

    async def receive_fields(self, count: int) -> list[str]:
        """Receive `count` fields of printable ASCII, unparsed, from an unauthenticated peer; raises PeerError."""
        line = await self.receive_line()
        if len(line) > _HANDSHAKE_LINE or not _FIELDS.fullmatch(line) or line.count(b" ") != count - 1:
            raise PeerError
        return line.decode("ascii").split(" ")

    async def send(self, message: Message) -> None:
        """Send one JSON message; raises OSError."""
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()

    def close(self) -> None:
        """Close the connection without waiting."""
        self.writer.close()


async def connect(host: str, port: int, secret: str, purpose: Purpose) -> Connection:
    """Connect to an agent and authenticate both sides.

    Args:
        host: Address of the server.
        port: Port of the server.
        secret: The run's shared secret, hexadecimal.
        purpose: `agent`: exchange rendezvous messages; `store`: forward to the server's store.

    Raises:
        OSError: No connection.
        PeerError: The server is not an agent of this run.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=_LIMIT)
    connection = Connection(reader, writer)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            mine = secrets.token_hex(16)
            await connection.send_fields(GREETING, mine)
            theirs, proof = await connection.receive_fields(2)
            _require(proof, prove(secret, "server", mine, theirs))
            await connection.send_fields(purpose, prove(secret, "client", theirs, mine, purpose))
            if await connection.receive_fields(1) != [purpose]:
                raise PeerError
    except (TimeoutError, EOFError, ConnectionResetError) as error:
        connection.close()
        raise PeerError from error
    except BaseException:
        connection.close()
        raise
    return connection


async def accept(connection: Connection, secret: str) -> Purpose:
    """Authenticate both sides of an incoming connection; return its purpose. Raises PeerError."""
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            greeting, theirs = await connection.receive_fields(2)
            if greeting != GREETING:
                raise PeerError
            mine = secrets.token_hex(16)
            await connection.send_fields(mine, prove(secret, "server", theirs, mine))
            purpose, proof = await connection.receive_fields(2)
            _require(proof, prove(secret, "client", mine, theirs, purpose))
            await connection.send_fields(purpose)
    except (TimeoutError, EOFError, OSError) as error:
        raise PeerError from error
    return "store" if purpose == "store" else "agent"


def _require(given: str, expected: str) -> None:
    if not hmac.compare_digest(given, expected):
        raise PeerError


async def join_streams(one: Connection, other: Connection) -> None:
    """Copy bytes between two connections, in both directions, until either ends."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while block := await reader.read(_BLOCK):
                writer.write(block)
                await writer.drain()

    there = asyncio.ensure_future(carry(one.reader, other.writer))
    back = asyncio.ensure_future(carry(other.reader, one.writer))
    try:
        await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (there, back):
            task.cancel()
        one.close()
        other.close()


def enable_keepalive(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, and enable keepalive probes, which detect a peer that vanished without closing."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
