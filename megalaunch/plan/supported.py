"""The limits of the engine, as data; this table only shrinks. Shown by `doctor`, `validate-config`, `plan`,
`recipes list` and the reference.

Every other value of these keys composes, validates and plans; `train` rejects it by the rule engine.unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalaunch.plan.findings import as_override
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec
from megalaunch.schema.paths import value_at


@dataclass(frozen=True)
class Limit:
    """A key of which the engine supports only the `supported` values; `meaning` describes the other values."""

    path: str
    supported: tuple[Any, ...]
    meaning: str

    def allows(self, spec: RunSpec) -> bool:
        """Return True if the engine supports the spec's value of this key."""
        return value_at(spec, self.path) in self.supported


LIMITS = (
    Limit("precision.compute_dtype", ("auto", "fp32", "bf16", "fp16"), "fp8"),
    Limit("precision.main_params_dtype", ("fp32",), "weights without fp32 main params"),
    Limit("optimizer.optimizer_offload_fraction", (0.0,), "optimizer states in host memory"),
)


ENGINE_DEVICES = ("cpu", "cuda")
CHIP_LIMIT = Limit(
    "platform.chip",
    ("auto", *(name for name, chip in CHIPS.items() if chip.device in ENGINE_DEVICES)),
    "chips that the engine does not support",
)
"""The limit on devices; not in LIMITS, whose entries a test on one machine can verify against the engine."""

MEANINGLESS: Mapping[str, str] = MappingProxyType(
    {
        "precision.fp8.": "precision.compute_dtype",
    }
)
"""Keys, or sections, without effect while the engine supports only one value of the key that they map to."""


def deciding_limit(path: str) -> Limit | None:
    """Return the limit on a key, or on the key that it depends on; None: all of its values are supported."""
    limits = {limit.path: limit for limit in (*LIMITS, CHIP_LIMIT)}
    if path in limits:
        return limits[path]
    for entry, decides in MEANINGLESS.items():
        if path == entry or (entry.endswith(".") and path.startswith(entry)):
            return limits.get(decides)
    return None


def not_trained(spec: RunSpec) -> tuple[str, ...]:
    """Return a description of each unsupported value of a spec, without repetition."""
    return tuple(
        dict.fromkeys(f"{limit.meaning} ({limit.path}={as_override(value)})" for limit, value in unsupported(spec))
    )


def unsupported(spec: RunSpec) -> Iterator[tuple[Limit, Any]]:
    """Yield every limit that the spec exceeds, with its value."""
    for limit in (*LIMITS, CHIP_LIMIT):
        if limit is CHIP_LIMIT and spec.platform.chip not in CHIPS:
            continue  # the rule platform.chip reports it
        if not limit.allows(spec):
            yield limit, value_at(spec, limit.path)
