"""A node's side of the preflight: report on itself, then try the other nodes and the run directory when node 0 asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megalaunch.engine.agent.channel import Message
from megalaunch.engine.agent.neighbours import Listener, reach
from megalaunch.engine.agent.node_report import NodeReport, Problem
from megalaunch.engine.agent.shared_directory import check_shared


class Inspection:
    """The checks of one node, before the first round.

    Args:
        node: rank of this node's agent.
        root: run directory.
        secret: the run's shared secret.
        local_problems: returns what is wrong with this node, from its address on its route to node 0; may block.
    """

    def __init__(self, node: int, root: Path, secret: str, local_problems: Callable[[str], Sequence[Problem]]) -> None:
        self._node, self._root, self._secret, self._local_problems = node, root, secret, local_problems
        self._listener = Listener(node, secret)

    async def report(self, address: str) -> NodeReport:
        """Inspect this node and listen for the others."""
        problems = list(await asyncio.to_thread(self._local_problems, address))
        try:
            port = await self._listener.open(address)
        except OSError as error:
            problems.append(Problem(f"it cannot listen on {address} ({error.strerror})", "free some ports there"))
            port = 0
        return await asyncio.to_thread(NodeReport.of_this_node, problems, address, port)

    async def answer(self, asked: dict[str, Any]) -> Message:
        """Return what node 0 asks for.

        Args:
            asked: `token` of the shared directory, None: it is not tried; `neighbours`: node, address and port of each.
        """
        neighbours = [(int(node), str(address), int(port)) for node, address, port in asked["neighbours"]]
        reached = asyncio.gather(*(reach(node, address, port, self._secret) for node, address, port in neighbours))
        problem, is_locked = None, True
        if self._node > 0 and asked["token"] is not None:
            problem, is_locked = await asyncio.to_thread(check_shared, self._root, str(asked["token"]), self._node)
        reasons = await reached
        unreached = [[node, reason] for (node, _, _), reason in zip(neighbours, reasons, strict=True) if reason]
        return {"unreached": unreached, "problem": problem, "is_locked": is_locked}

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
