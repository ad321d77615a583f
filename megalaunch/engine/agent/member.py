"""Client side of the rendezvous, on every node: join rounds, detect lost nodes, forward the store to workers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megalaunch.engine.agent.channel import Connection, PeerError, connect, join_streams
from megalaunch.engine.agent.coordinator import BEAT_SECONDS, SILENT_SECONDS, Coordinator
from megalaunch.engine.agent.inspection import Inspection
from megalaunch.engine.agent.output import log
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.rendezvous import Credentials

T = TypeVar("T")
RENDEZVOUS_SECONDS = 600.0
"""Timeout of a rendezvous, long because nodes are started by hand, one after the other."""
UNKNOWN_NAME_SECONDS = 6.0
_RETRY_SECONDS = 0.5
_OPEN_FILES = 1 << 16  # no more: programs that workers start may close each possible file


class RendezvousProblem(Exception):
    """The workers of this node cannot run; the message gives the reason in one sentence."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.CONFIGURATION) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class PreflightFailed(RendezvousProblem):
    """Nodes failed the preflight.

    Attributes:
        nodes: their ranks.
    """

    def __init__(self, message: str, nodes: Sequence[int]) -> None:
        super().__init__(message)
        self.nodes = list(nodes)


class WorkersEnded(RendezvousProblem):
    """The workers of node `node` have ended for good, while those of this node failed and wait for a restart."""

    def __init__(self, node: int) -> None:
        super().__init__(f"the workers of node {node} have ended; those of this node failed", ExitCode.CRASH)


class NodeLost(RendezvousProblem):
    """Another node was lost during the run; `first_remaining` is the lowest rank of the remaining nodes."""

    def __init__(self, message: str, first_remaining: int) -> None:
        self.first_remaining = first_remaining
        super().__init__(message, ExitCode.CRASH)


@dataclass(frozen=True)
class Endpoint:
    """Address of node 0, as given on the command line."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class EventLoop:
    """An event loop on a daemon thread, which ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rendezvous", daemon=True).start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop; wait for its result and return it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


class Member:
    """Membership of one node in the rendezvous, from `register` to `leave`.

    Args:
        node: Rank of this node.
        nodes: Number of nodes.
        endpoint: Address of node 0.
        credentials: The run's shared secret.
        failed: Called on the event loop's thread when the run cannot continue.
        inspection: This node's checks before the first round; None: there are none.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        endpoint: Endpoint,
        credentials: Credentials,
        failed: Callable[[], None],
        inspection: Inspection | None = None,
    ) -> None:
        self._node, self._nodes, self._endpoint = node, nodes, endpoint
        self._credentials, self._failed, self._inspection = credentials, failed, inspection
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._problem: RendezvousProblem | None = None
        self._round = self._joined = self._waiting = 0
        self._missing: list[int] = []
        self._last_message = 0.0
        self._leaving = False
        self.address = ""
        """Address of this node on its route to node 0."""

    async def register(self, fingerprint: str) -> None:
        """Connect to node 0 and start sending heartbeats; raises RendezvousProblem."""
        self._connection = connection = await self._reach()
        self.address = connection.writer.get_extra_info("sockname")[0]
        hello = {"node": self._node, "host": socket.gethostname(), "fingerprint": fingerprint}
        if self._inspection is not None:
            hello["report"] = (await self._inspection.report(self.address)).to_json()
        await connection.send(hello)
        self._last_message = time.monotonic()
        self._tasks = [asyncio.ensure_future(self._listen(connection)), asyncio.ensure_future(self._beat(connection))]

    async def _reach(self) -> Connection:
        began, logged = time.monotonic(), False
        while True:
            waited = time.monotonic() - began
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    return await connect(self._endpoint.host, self._endpoint.port, self._credentials.secret, "agent")
            except PeerError:
                raise RendezvousProblem(
                    f"the process on {self._endpoint} is not node 0 of this run: another program uses the port, or its "
                    "rendezvous.json differs from this node's"
                ) from None
            except socket.gaierror as error:
                if error.errno != socket.EAI_AGAIN or waited > UNKNOWN_NAME_SECONDS:
                    raise RendezvousProblem(
                        f"the address of node 0, {self._endpoint.host}, cannot be resolved on this node "
                        f"({error.strerror}): use an address that every node reaches"
                    ) from None
            except OSError as error:  # includes TimeoutError
                reason = os.strerror(error.errno) if error.errno else "no answer"
                if waited > RENDEZVOUS_SECONDS:
                    raise RendezvousProblem(
                        f"node 0 did not answer on {self._endpoint} for {RENDEZVOUS_SECONDS:.0f} s ({reason})",
                        ExitCode.CRASH,
                    ) from None
                if not logged:
                    log(f"waiting for node 0 on {self._endpoint} ({reason})")
                    logged = True
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self, connection: Connection) -> None:
        try:
            while True:
                message = await connection.receive()
                with self._changed:
                    self._last_message = time.monotonic()
                    self._take(message)
                    self._changed.notify_all()
        except (OSError, EOFError, PeerError):
            self._lose_first("its agent has ended")

    def _take(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._round, self._waiting = int(message["start"]), 0
            if self._inspection is not None:
                self._inspection.close()
        elif "waiting" in message:
            self._waiting = int(message["waiting"])
            self._missing = list(message["missing"])
        elif "refused" in message:
            self._fail(RendezvousProblem(f"node 0 refused this node: {message['refused']}"))
        elif "check" in message and self._inspection is not None:
            self._tasks.append(asyncio.ensure_future(self._answer(self._inspection, message["check"])))
        elif "failed" in message:
            self._fail(PreflightFailed(str(message["failed"]), [int(node) for node in message["nodes"]]))
        elif "over" in message:
            self._fail(WorkersEnded(int(message["over"])))
        elif "lost" in message:
            node = int(message["lost"])
            self._fail(NodeLost(lost_node_message(node, str(message["host"])), 1 if node == 0 else 0))

    async def _answer(self, inspection: Inspection, asked: dict[str, Any]) -> None:
        answer = await inspection.answer(asked)
        if self._connection is not None:
            with contextlib.suppress(OSError):
                await self._connection.send({"checked": answer})

    async def _beat(self, connection: Connection) -> None:
        while True:
            with contextlib.suppress(OSError):
                await connection.send({"beat": self._round})
            await asyncio.sleep(BEAT_SECONDS)
            if time.monotonic() - self._last_message > SILENT_SECONDS:
                self._lose_first(f"no heartbeat for {SILENT_SECONDS:.0f} s")
                return

    def _lose_first(self, reason: str) -> None:
        with self._changed:
            if not self._leaving:
                self._fail(NodeLost(f"node 0 ({self._endpoint.host}) is lost: {reason}", 1))
            self._changed.notify_all()

    def _fail(self, problem: RendezvousProblem) -> None:
        if self._problem is None:
            self._problem = problem
            self._failed()

    # -- called on the agent's thread

    def join(self, loop: EventLoop) -> int:
        """Join the next round and wait for all nodes; returns the round's number. Raises RendezvousProblem."""
        self._joined = self._round + 1
        self._send(loop, {"join": self._joined})
        began, logged = time.monotonic(), False
        with self._changed:
            while self._round < self._joined:
                self.require_all()
                waited = time.monotonic() - began
                missing = ", ".join(map(str, self._missing))
                if waited > RENDEZVOUS_SECONDS:
                    raise RendezvousProblem(
                        f"not all nodes joined within {RENDEZVOUS_SECONDS:.0f} s; missing: {missing or 'none'}",
                        ExitCode.CRASH,
                    )
                if waited > 2 and missing and not logged:
                    log(f"waiting for node {missing} of {self._nodes} nodes")
                    logged = True
                self._changed.wait(0.2)
            self.require_all()
            return self._round

    def require_all(self) -> None:
        """Raise RendezvousProblem if the run cannot continue."""
        if self._problem is not None:
            raise self._problem

    def raise_if_node_lost(self) -> None:
        """Raise NodeLost if another node was lost."""
        if isinstance(self._problem, NodeLost):
            raise self._problem

    def waiting(self) -> int:
        """Return how many nodes wait for a new round that this node has not joined yet."""
        return self._waiting if self._joined == self._round else 0

    def leave(self, loop: EventLoop) -> None:
        """Send `bye` to the coordinator: this agent exits normally."""
        self._leaving = True
        with contextlib.suppress(RendezvousProblem):
            self._send(loop, {"bye": True})

    def _send(self, loop: EventLoop, message: dict[str, Any]) -> None:
        assert self._connection is not None, "register first"
        try:
            loop.call(self._connection.send(message))
        except OSError:
            self._lose_first("its agent has ended")
            self.require_all()

    async def forward_store(self) -> int:
        """Forward a loopback port to node 0's store, for this node's workers; returns the port."""

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            here = Connection(reader, writer)
            try:
                there = await connect(self._endpoint.host, self._endpoint.port, self._credentials.secret, "store")
            except (OSError, PeerError):
                here.close()
                return
            await join_streams(here, there)

        self._server = await asyncio.start_server(forward, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])


def open_coordinator(
    loop: EventLoop,
    nodes: int,
    endpoint: Endpoint,
    credentials: Credentials,
    fingerprint: str,
    store_port: int,
    checked_directory: Path | None = None,
) -> Coordinator:
    """Start the coordinator on node 0's address only; raises RendezvousProblem. Arguments are those of Coordinator."""
    try:
        address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise RendezvousProblem(
            f"the address of node 0, {endpoint.host}, cannot be resolved on this node ({error.strerror}): use an "
            "address that every node reaches"
        ) from None
    coordinator = Coordinator(nodes, credentials, fingerprint, store_port, checked_directory)
    _allow_open_files()
    try:
        loop.call(coordinator.serve(str(address), endpoint.port))
    except OSError as error:
        fix = "use an address of this node, or start --node-rank=0 there"
        if error.errno == errno.EADDRINUSE:
            fix = "end the program that uses the port, or give all nodes another port"
        raise RendezvousProblem(f"cannot listen on {endpoint} ({os.strerror(error.errno or 0)}): {fix}") from None
    return coordinator


def _allow_open_files() -> None:
    """Raise the limit of open files: each worker's connection to the store takes three of node 0."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a limit that the system does not take stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))


def lost_node_message(node: int, host: str) -> str:
    """Return the message about a lost node that the remaining nodes print."""
    return f"node {node} ({host}) is lost: its agent or machine has ended, or its network has failed"
