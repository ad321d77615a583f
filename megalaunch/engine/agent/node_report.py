"""What a node reports about itself when it registers, before any worker starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from megalaunch.platform.software import Software


class Problem(NamedTuple):
    """Why a node cannot run the workers, as a clause without the node's name, and what to do about it."""

    cause: str
    fix: str


@dataclass(frozen=True)
class NodeReport:
    """Facts about one node.

    Attributes:
        software: its versions.
        problems: what the node found itself.
        address: on which it listens for the other nodes until the first round starts; `port` is the port.
        clock: its time when it sent the report, in seconds since 1970.
    """

    software: Software
    problems: tuple[Problem, ...]
    address: str
    port: int
    clock: float

    @classmethod
    def of_this_node(cls, problems: Sequence[Problem], address: str, port: int) -> NodeReport:
        """Return the report of this node, to be sent at once: it has the time."""
        return cls(Software.of_this_node(), tuple(problems), address, port, time.time())

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {
            "software": list(astuple(self.software)),
            "problems": [list(problem) for problem in self.problems],
            "address": self.address,
            "port": self.port,
            "clock": self.clock,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> NodeReport:
        """Return the report of another node. Raises KeyError, TypeError or ValueError if it has another form."""
        return cls(
            Software(*map(str, values["software"])),
            tuple(Problem(*map(str, problem)) for problem in values["problems"]),
            str(values["address"]),
            int(values["port"]),
            float(values["clock"]),
        )
