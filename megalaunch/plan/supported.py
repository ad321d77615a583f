"""The limits of the engine, as data; this table only shrinks. Shown by `doctor --all`, `validate-config`, `plan`,
`recipes list` and the reference.

Every other value of these keys composes, validates and plans; `train` rejects it by the rule engine.unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalaunch.plan.findings import as_override
from megalaunch.schema import RunSpec
from megalaunch.schema.paths import value_at


@dataclass(frozen=True)
class Limit:
    """A key of which the engine supports only the `supported` values where another key has a certain value.

    Attributes:
        path: the key.
        supported: its values that the engine supports.
        meaning: describes the other values.
        condition: another key, and its value with which the limit applies.
        unlimited: the value of that key with which it does not.
    """

    path: str
    supported: tuple[Any, ...]
    meaning: str
    condition: tuple[str, Any]
    unlimited: Any

    def allows(self, spec: RunSpec) -> bool:
        """Return True if the engine supports the spec's value of this key."""
        key, value = self.condition
        return value_at(spec, key) != value or value_at(spec, self.path) in self.supported


LIMITS = (
    Limit(
        "model.moe.num_experts",
        (None,),
        "experts by Transformer Engine",
        ("precision.fp8.implementation", "transformer_engine"),
        "native",
    ),
)


def deciding_limit(path: str) -> Limit | None:
    """Return the limit on a key; None: all of its values are supported."""
    return next((limit for limit in LIMITS if limit.path == path), None)


def not_trained(spec: RunSpec) -> tuple[str, ...]:
    """Return a description of each unsupported value of a spec, without repetition."""
    return tuple(
        dict.fromkeys(f"{limit.meaning} ({limit.path}={as_override(value)})" for limit, value in unsupported(spec))
    )


def unsupported(spec: RunSpec) -> Iterator[tuple[Limit, Any]]:
    """Yield every limit that the spec exceeds, with its value."""
    for limit in LIMITS:
        if not limit.allows(spec):
            yield limit, value_at(spec, limit.path)
