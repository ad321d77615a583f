"""Drop layouts that violate a rule, by running only the rules whose outcome depends on the layout.

Those rules are not listed but found: each rule runs once on a spec that records reads of its layout. A rule that reads
none of it says the same of every layout of the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from megalaunch.plan import rules as _all_rules  # noqa: F401  (registers them)
from megalaunch.plan.overrides import override_findings
from megalaunch.plan.rules.registry import RULES, Rule, RuleContext
from megalaunch.schema import RunSpec

TOO_BIG = "memory.fits"
"""The rule for layouts that do not fit (plan/rules/memory.py); a search calls the memory model itself: faster."""

_SECTIONS = ("parallel", "batch", "recompute")
"""The sections of a spec that a search changes."""


@dataclass(frozen=True)
class Refusal:
    """An error of a rule: the engine does not start such a run."""

    rule: str
    message: str


@dataclass(frozen=True)
class LayoutRules:
    """The rules for the layouts of one spec.

    Attributes:
        rules: those whose outcome depends on the layout, except `memory.fits`.
        refusals: errors of the others: every layout has them.
    """

    rules: tuple[Rule, ...]
    refusals: tuple[Refusal, ...]


def find_layout_rules(spec: RunSpec) -> LayoutRules:
    """Separate the rules whose outcome depends on the layout of a spec from those with one outcome for all layouts."""
    rules: list[Rule] = []
    refusals = [Refusal(found.rule, found.message) for found in override_findings(spec) if found.severity == "error"]
    for entry in RULES.values():
        if _reads_layout(entry, spec):
            rules.append(entry)
        else:
            refusal = first_refusal(spec, (entry,))
            refusals += [refusal] if refusal else []
    return LayoutRules(tuple(entry for entry in rules if entry.id != TOO_BIG), tuple(refusals))


def first_refusal(spec: RunSpec, rules: Iterable[Rule]) -> Refusal | None:
    """Return the first error of the rules on a spec, or None."""
    at = RuleContext(spec)
    for entry in rules:
        for item in entry.check(at):
            if item.severity == "error":
                return Refusal(entry.id, item.message)
    return None


def _reads_layout(entry: Rule, spec: RunSpec) -> bool:
    """Return whether a rule reads any key of the layout of a spec."""
    read: set[str] = set()
    recording = {name: _recording(getattr(spec, name), read.add) for name in _SECTIONS}
    for _ in entry.check(RuleContext(replace(spec, **recording))):
        pass
    return bool(read)


def _recording(section: Any, read: Callable[[str], None]) -> Any:
    """Return an equal section of a spec that calls `read` with the name of each attribute that is read."""

    class Recorded(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read(name)
            return object.__getattribute__(self, name)

    return Recorded(**vars(section))
