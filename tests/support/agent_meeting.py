"""Agents that meet over real sockets in one process: a coordinator, and members on event loops of their own."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from pathlib import Path

import pytest

from megalaunch.engine.agent.member import Endpoint, EventLoop, Member, RendezvousProblem, open_coordinator
from megalaunch.rundir.rendezvous import Credentials

MINE = Credentials("a" * 64, "b" * 64)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(autouse=True)
def ended_loops(monkeypatch):
    """End what a test leaves on its event loops, which an agent's process ends with itself."""
    loops: list[asyncio.AbstractEventLoop] = []
    begin = EventLoop.__init__

    def record(self: EventLoop) -> None:
        begin(self)
        loops.append(self.loop)

    async def end() -> None:
        # Python 3.11 reports each cancelled handler of a server as an error, into what the next test captures.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        asyncio.get_running_loop().stop()

    monkeypatch.setattr(EventLoop, "__init__", record)
    yield
    for loop in loops:
        asyncio.run_coroutine_threadsafe(end(), loop)
    for loop in loops:
        _close(loop)
    gc.collect()  # transports, which are in cycles, close their sockets


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Close the files of a loop that has ended; one that a test has put to sleep keeps them."""
    deadline = time.monotonic() + 1
    while loop.is_running() and time.monotonic() < deadline:
        time.sleep(0.005)
    if not loop.is_running():
        loop.close()


class Meeting:
    """A coordinator and members of it, each member on a loop of its own as in a process of its own."""

    def __init__(self, nodes: int, store_port: int = 1, checked_directory: Path | None = None) -> None:
        self.nodes, self.endpoint = nodes, Endpoint("127.0.0.1", free_port())
        self.first = EventLoop()
        self.coordinator = open_coordinator(
            self.first, nodes, self.endpoint, MINE, "spec", store_port, checked_directory
        )
        self.loops: dict[int, EventLoop] = {}
        self.failed: list[int] = []

    def come(self, node: int, credentials: Credentials = MINE, fingerprint: str = "spec") -> Member:
        loop = self.loops[node] = EventLoop()
        one = Member(node, self.nodes, self.endpoint, credentials, lambda: self.failed.append(node))
        loop.call(one.register(fingerprint))
        return one

    def join(self, members: dict[int, Member]) -> dict[int, int | RendezvousProblem]:
        """All of them at once: the round of each, or why not."""
        results: dict[int, int | RendezvousProblem] = {}

        def join(node: int, one: Member) -> None:
            try:
                results[node] = one.join(self.loops[node])
            except RendezvousProblem as problem:
                results[node] = problem

        threads = [threading.Thread(target=join, args=item, daemon=True) for item in members.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results
