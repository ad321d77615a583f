"""What the engine can run today, as data. Shown by `megalaunch doctor`; this table only shrinks.

Every other value of these keys composes, validates and plans; `train` refuses it by the rule engine.unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalaunch.config.schema import RunSpec


@dataclass(frozen=True)
class Limit:
    """A key of which the engine runs the `supported` values only; `meaning` says what the others would be."""

    path: str
    supported: tuple[Any, ...]
    meaning: str


LIMITS = (
    Limit("parallel.tp", (1,), "tensor parallelism"),
    Limit("parallel.pp", (1,), "pipeline parallelism"),
    Limit("parallel.cp", (1,), "context parallelism"),
    Limit("parallel.ep", (1,), "expert parallelism"),
    Limit("parallel.etp", (None, 1), "tensor parallelism inside experts"),
    Limit("parallel.vpp", (None, 1), "interleaved pipeline stages"),
    Limit("parallel.sequence_parallel", (False,), "sequence parallelism"),
)


def unsupported(spec: RunSpec) -> Iterator[tuple[Limit, Any]]:
    """Every limit that the spec goes beyond, with its value."""
    for limit in LIMITS:
        section, _, key = limit.path.partition(".")
        value = getattr(getattr(spec, section), key)
        if value not in limit.supported:
            yield limit, value
