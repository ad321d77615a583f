"""Server side of the rendezvous, on node 0: registers nodes, checks them, starts rounds, detects lost nodes.

It listens on one address of this node; the store itself listens on the loopback interface only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from megalaunch.engine.agent.channel import Connection, Message, PeerError, accept, join_streams
from megalaunch.engine.agent.node_report import NodeReport, Problem
from megalaunch.engine.agent.output import log
from megalaunch.engine.agent.preflight import Findings, examine
from megalaunch.rundir.rendezvous import Credentials

BEAT_SECONDS = 1.0
SILENT_SECONDS = 8.0
"""An agent without a heartbeat for this long is lost: its node or the network to it failed."""
MAX_UNAUTHENTICATED = 256
"""Handshakes at a time; further connections wait, as a client that is turned away takes this node for another."""
_BACKLOG = 4096  # connections that the system holds until they are accepted: all nodes come at once
_OTHER_SPEC = Problem("its spec.yaml differs from node 0's", "all nodes must share the run directory")


@dataclass
class _Peer:
    connection: Connection
    host: str
    node_report: NodeReport | None = None
    clock_ahead: float = 0.0
    round: int = 0  # the last round that it has requested to join
    last_message: float = 0.0
    done: bool = False
    lost: bool = False
    answer: asyncio.Future[Message] | None = None

    @property
    def report(self) -> NodeReport:
        """What it reported; every agent does where the preflight is on."""
        assert self.node_report is not None, "the spec, and with it the preflight, is the same on all nodes"
        return self.node_report

    async def ask(self, question: Message, seconds: float) -> Message:
        """Send a question and wait for the answer. Raises OSError, which includes TimeoutError."""
        self.answer = asyncio.get_running_loop().create_future()
        await self.connection.send(question)
        return await asyncio.wait_for(self.answer, seconds)


class Coordinator:
    """Rendezvous server. Runs on a separate event loop.

    Args:
        nodes: Number of nodes.
        credentials: The run's shared secret.
        fingerprint: SHA-256 of spec.yaml; agents with another one are refused.
        store_port: Port of the store on the loopback interface.
        checked_directory: Run directory, with which the nodes are checked before the first round; None: they are not.
    """

    def __init__(
        self,
        nodes: int,
        credentials: Credentials,
        fingerprint: str,
        store_port: int,
        checked_directory: Path | None = None,
    ) -> None:
        self._nodes, self._credentials, self._fingerprint = nodes, credentials, fingerprint
        self._store_port, self._checked_directory = store_port, checked_directory
        self._peers: dict[int, _Peer] = {}
        self._refused: dict[int, str] = {}  # hosts of nodes with another spec.yaml
        self._preflight: asyncio.Task[None] | None = None
        self._round = 0
        self._handshakes = asyncio.Semaphore(MAX_UNAUTHENTICATED)
        self._over = False

    async def serve(self, address: str, port: int) -> asyncio.Server:
        """Start listening; raises OSError if the address is not this node's or the port is in use."""
        server = await asyncio.start_server(
            self._handle_connection, address, port, reuse_address=True, backlog=_BACKLOG
        )
        self._beat = asyncio.ensure_future(self._send_heartbeats())
        return server

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            async with self._handshakes:
                purpose = await accept(connection, self._credentials.secret)
        except PeerError:
            connection.close()
            return
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
            await self._start_if_complete()  # it may have been the last one that the others waited for
            return
        peer = self._peers[node] = _Peer(connection, str(hello.get("host")), last_message=time.monotonic())
        self._refused.pop(node, None)
        try:
            if hello.get("report") is not None:
                peer.node_report = NodeReport.from_json(hello["report"])
                peer.clock_ahead = peer.node_report.clock - time.time()
            while not peer.done:
                message = await connection.receive()
                peer.last_message = time.monotonic()
                if "join" in message:
                    peer.round = self._round + 1
                    await self._start_if_complete()
                elif "checked" in message and peer.answer is not None and not peer.answer.done():
                    peer.answer.set_result(message["checked"])
                peer.done = "bye" in message
        finally:
            if not peer.done:
                await self._lose(node, peer)
            elif any(other.round > self._round for other in self._peers.values()):
                await self._broadcast({"over": node})

    def _refusal(self, hello: Message) -> str | None:
        node = int(hello.get("node", -1))
        if not 0 <= node < self._nodes:
            return f"--node-rank={node} is not in 0 to {self._nodes - 1}: the run has {self._nodes} nodes"
        if node in self._peers:
            return f"--node-rank={node} is used by {self._peers[node].host}: give each node its own rank"
        if hello.get("fingerprint") != self._fingerprint:
            self._refused[node] = str(hello.get("host"))
            return f"{_OTHER_SPEC.cause}: {_OTHER_SPEC.fix}"
        return None

    async def _start_if_complete(self) -> None:
        """Start the next round if all nodes wait for it; before the first one, check them."""
        waiting = [node for node, peer in self._peers.items() if peer.round > self._round]
        done = next((node for node, other in self._peers.items() if other.done), None)
        checks = self._checked_directory is not None and self._round == 0
        if not waiting:
            return
        if done is not None:
            await self._broadcast({"over": done})
        elif checks and len(waiting) + len(self._refused) == self._nodes:
            if self._preflight is None or self._preflight.done():
                self._preflight = asyncio.ensure_future(self._check_nodes())
        elif len(waiting) == self._nodes:
            await self._start_round()
        else:
            missing = sorted(set(range(self._nodes)) - set(self._peers))
            await self._broadcast({"waiting": len(waiting), "missing": missing})

    async def _start_round(self) -> None:
        self._round += 1
        await self._broadcast({"start": self._round})

    async def _check_nodes(self) -> None:
        """Start the first round, or refuse it on all nodes with the names of those that failed."""
        assert self._checked_directory is not None, "the caller has looked"
        peers = dict(self._peers)
        found = await examine(peers, self._checked_directory) if 0 in peers else Findings()
        for node in self._refused:
            found.problems[node].append(_OTHER_SPEC)
        for warning in found.warnings:
            log(f"warning: {warning}")
        if not found.problems and self._peers == peers:
            await self._start_round()
            return
        if not found.problems:  # a node has left meanwhile: it may come again, and is then checked
            self._preflight = None
            await self._start_if_complete()
            return
        hosts = {**self._refused, **{node: peer.host for node, peer in peers.items()}}
        await self._broadcast({"failed": found.refusal(hosts, self._nodes), "nodes": sorted(found.problems)})

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
