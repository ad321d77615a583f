"""Settings that have an effect only with another setting: a table, with one rule per row.

A key without effect is a warning, never an error: the run equals the one without the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from megalaunch.plan.findings import Severity, as_override
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec
from megalaunch.schema.build import leaves
from megalaunch.schema.paths import value_at


@dataclass(frozen=True)
class InertSetting:
    """One row: `keys` (a trailing dot: a section) have no effect unless `holds`; `switch` is the key that decides.

    `reason` ends the message "KEY=VALUE has no effect: ..."; `instead` are changes that give the keys an effect.
    """

    id: str
    sentence: str
    why: str
    keys: tuple[str, ...]
    switch: str
    holds: Callable[[RunSpec], bool]
    reason: str
    instead: tuple[Fix, ...] = ()
    severity: Severity = "warning"

    def paths(self) -> tuple[str, ...]:
        """Return the keys of the row, without the switch itself."""
        return tuple(
            path
            for path in defaults()
            if path != self.switch
            and any(path == key or (key[-1] == "." and path.startswith(key)) for key in self.keys)
        )


DEPENDENT: dict[str, InertSetting] = {}
"""Every row by its id; a test checks that the engine ignores no key without a row."""


def register_inert(row: InertSetting) -> None:
    """Register a row and its rule."""
    paths = row.paths()

    def check(at: RuleContext) -> Iterator[Violation]:
        if not row.holds(at.spec):
            yield from no_effect(at.spec, paths, row.reason, row.instead, row.severity)

    check.__doc__ = row.why
    DEPENDENT[row.id] = row
    rule(row.id, row.sentence)(check)


def no_effect(
    spec: RunSpec, paths: tuple[str, ...], reason: str, instead: tuple[Fix, ...] = (), severity: Severity = "warning"
) -> Iterator[Violation]:
    """Yield a violation for each key that differs from its default."""
    for path in paths:
        value, default = value_at(spec, path), defaults()[path]
        if value != default:
            message = f"{path}={as_override(value)} has no effect: {reason}"
            yield Violation(path, message, {"value": value}, ({path: default}, *instead), severity)


def on_cpu(spec: RunSpec) -> bool:
    """Return True if the run is known to be on CPUs."""
    return spec.platform.chip in CHIPS and CHIPS[spec.platform.chip].device == "cpu"


@cache
def defaults() -> Mapping[str, Any]:
    """Return the default of every key of the schema that has one."""
    found = {path: entry.default for path, _, entry in leaves(RunSpec) if entry.default is not MISSING}
    return MappingProxyType(found)
