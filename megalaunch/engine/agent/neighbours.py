"""Check that the nodes reach each other, not only node 0: each connects to some others on the workers' interface."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from megalaunch.engine.agent.channel import Connection, PeerError, accept, connect

NEIGHBOURS = 8
"""Nodes that each node connects to: a node that is not reached is still found in a run of many."""
REACH_SECONDS = 4.0


class Listener:
    """Answer the connections of other nodes with the rank of this one, until it is closed."""

    def __init__(self, node: int, secret: str) -> None:
        self._node, self._secret = node, secret
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> int:
        """Listen on one address of this node; returns the port. Raises OSError."""
        self._server = await asyncio.start_server(self._answer, address, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            await accept(connection, self._secret)
            await connection.send({"node": self._node})
        except (OSError, PeerError):
            pass
        connection.close()


def neighbours_of(node: int, nodes: Sequence[int]) -> list[int]:
    """Return the nodes that a node connects to: those that follow it, in a ring."""
    ring = sorted(nodes)
    at = ring.index(node)
    return (ring[at + 1 :] + ring[:at])[:NEIGHBOURS]


async def reach(node: int, address: str, port: int, secret: str) -> str | None:
    """Connect to another node; return why it is not reached, None if it is."""
    try:
        async with asyncio.timeout(REACH_SECONDS):
            connection = await connect(address, port, secret, "agent")
            try:
                answered = (await connection.receive()).get("node")
            finally:
                connection.close()
    except PeerError:
        return "another program answers"
    except TimeoutError:
        return "no answer"
    except EOFError:
        return "the connection was closed"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None if answered == node else f"node {answered} answers"
