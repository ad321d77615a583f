"""The connection to the agent of one node: calls of its actor, which renew the lease and bring the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.remote_agent import AGENT_CODES, BEAT_SECONDS
from megalaunch.launchers.ray.cluster import error_reason

_CLOSE_SECONDS = 12.0
_ANSWER_SECONDS = 60.0  # until an actor has started, and imported megalaunch


class RayNode(HeldNode):
    """One node in an actor of Ray."""

    def __init__(self, node: int, actor: Any, log: Path) -> None:
        """Wait for the actor. Raises NodeError."""
        import ray

        self._actor, self._log, self._unsent = actor, log, b""
        self._call: Any = None
        self._code: int | None = None
        self._lost = ""
        self._closing: Any = None
        try:
            address, self.port = ray.get(actor.place.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            raise NodeError(
                f"node {node} does not start in Ray: {error_reason(error)}", f"see {log}", (node,)
            ) from error
        super().__init__(node, address)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the node."""
        return "exit" in self.said or self._code is not None or bool(self._lost)

    def poll(self) -> None:
        """Renew the lease, and read what the agent has said."""
        import ray

        if self._call is None and not self.ended:
            data, self._unsent = self._unsent or b"\n", b""
            self._call = self._actor.exchange.remote(data, BEAT_SECONDS / 2)
        if self._call is not None and ray.wait([self._call], timeout=0)[0]:
            call, self._call = self._call, None
            try:
                read, self._code = ray.get(call)
            except ray.exceptions.RayError as error:
                self._lost = error_reason(error)
            else:
                self._read(read)

    def end_lease(self) -> None:
        """Let the agent kill all that it has started; `wait` waits for that."""
        if not self._lost and self._closing is None:
            self._call, self._closing = None, self._actor.close.remote()

    def wait(self) -> bool:
        """End the actor; return whether the agent has ended, and with it all that it had started."""
        import ray

        self.end_lease()
        code = None
        if self._closing is not None:
            try:
                code = ray.get(self._closing, timeout=_CLOSE_SECONDS)
            except ray.exceptions.RayError as error:  # a timeout too
                self._lost = self._lost or error_reason(error)
        ray.kill(self._actor)
        self._code = code if code is not None else self._code
        return code in AGENT_CODES

    def failure(self) -> NodeError:
        """Return why the agent ended before it has said anything."""
        return self.error(f"did not start: {self._lost or f'exit code {self._code}'}", f"see {self._log}")

    def _write(self, data: bytes) -> None:
        self._unsent += data  # goes with the next call
