"""Server side of the rendezvous, on node 0: registers nodes, starts rounds, detects lost nodes.

It listens on one address of this node; the store itself listens on the loopback interface only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from megalaunch.engine.agent.channel import Connection, Message, PeerError, accept, join_streams
from megalaunch.rundir.rendezvous import Credentials

BEAT_SECONDS = 1.0
SILENT_SECONDS = 8.0
"""An agent without a heartbeat for this long is lost: its node or the network to it failed."""
MAX_UNAUTHENTICATED = 256


@dataclass
class _Peer:
    connection: Connection
    host: str
    round: int = 0  # the last round that it has requested to join
    last_message: float = 0.0
    done: bool = False
    lost: bool = False


class Coordinator:
    """Rendezvous server. Runs on a separate event loop.

    Args:
        nodes: Number of nodes.
        credentials: The run's shared secret.
        fingerprint: SHA-256 of spec.yaml; agents with another one are refused.
        store_port: Port of the store on the loopback interface.
    """

    def __init__(self, nodes: int, credentials: Credentials, fingerprint: str, store_port: int) -> None:
        self._nodes, self._credentials, self._fingerprint = nodes, credentials, fingerprint
        self._store_port = store_port
        self._peers: dict[int, _Peer] = {}
        self._round = 0
        self._unauthenticated = 0
        self._over = False

    async def serve(self, address: str, port: int) -> asyncio.Server:
        """Start listening; raises OSError if the address is not this node's or the port is in use."""
        server = await asyncio.start_server(self._handle_connection, address, port, reuse_address=True)
        self._beat = asyncio.ensure_future(self._send_heartbeats())
        return server

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        if self._unauthenticated >= MAX_UNAUTHENTICATED:
            connection.close()
            return
        self._unauthenticated += 1
        try:
            purpose = await accept(connection, self._credentials.secret)
        except PeerError:
            connection.close()
            return
        finally:
            self._unauthenticated -= 1
        with contextlib.suppress(OSError, EOFError, PeerError):
            if purpose == "store":
                await join_streams(
                    connection, Connection(*await asyncio.open_connection("127.0.0.1", self._store_port))
                )
            else:
                await self._serve_agent(connection)
        connection.close()

    async def _serve_agent(self, connection: Connection) -> None:
        hello = await connection.receive()
        node, refusal = int(hello.get("node", -1)), self._refusal(hello)
        if refusal:
            await connection.send({"refused": refusal})
            return
        peer = self._peers[node] = _Peer(connection, str(hello.get("host")), last_message=time.monotonic())
        try:
            while not peer.done:
                message = await connection.receive()
                peer.last_message = time.monotonic()
                if "join" in message:
                    await self._join(peer)
                peer.done = "bye" in message
        finally:
            if not peer.done:
                await self._lose(node, peer)
            elif any(other.round > self._round for other in self._peers.values()):
                await self._broadcast({"over": node})

    def _refusal(self, hello: Message) -> str | None:
        node = int(hello.get("node", -1))
        if hello.get("fingerprint") != self._fingerprint:
            return "its spec.yaml differs from node 0's: copy the run directory to every node, or share it"
        if not 0 <= node < self._nodes:
            return f"--node-rank={node} is not in 0 to {self._nodes - 1}: the run has {self._nodes} nodes"
        if node in self._peers:
            return f"--node-rank={node} is used by {self._peers[node].host}: give each node its own rank"
        return None

    async def _join(self, peer: _Peer) -> None:
        peer.round = self._round + 1
        waiting = [other for other in self._peers.values() if other.round > self._round]
        done = next((node for node, other in self._peers.items() if other.done), None)
        if done is not None:
            await self._broadcast({"over": done})
        elif len(waiting) == self._nodes:
            self._round += 1
            await self._broadcast({"start": self._round})
        else:
            missing = sorted(set(range(self._nodes)) - set(self._peers))
            await self._broadcast({"waiting": len(waiting), "missing": missing})

    async def _lose(self, node: int, peer: _Peer) -> None:
        if self._peers.get(node) is not peer:
            return
        peer.lost = True
        if self._round == 0:  # before the first round, an agent may reconnect
            del self._peers[node]
        elif not self._over:
            self._over = True
            await self._broadcast({"lost": node, "host": peer.host})

    async def _broadcast(self, message: Message) -> None:
        for peer in list(self._peers.values()):
            if not peer.done and not peer.lost:
                with contextlib.suppress(OSError):
                    await peer.connection.send(message)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            for node, peer in list(self._peers.items()):
                if not (peer.done or peer.lost) and now - peer.last_message > SILENT_SECONDS:
                    peer.connection.writer.transport.abort()  # also wakes the task that reads from it
                    await self._lose(node, peer)
            await self._broadcast({"beat": self._round})

    async def wait_for_byes(self, seconds: float) -> None:
        """Wait until every agent has sent its goodbye or is lost, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(not (peer.done or peer.lost) for peer in self._peers.values()):
            await asyncio.sleep(0.05)
