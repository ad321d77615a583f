"""Drop layouts that violate a rule, by running only the rules that a layout can violate.

The checker takes a millisecond and verifies fixes; a search checks thousands of layouts. A test compares the result to
the checker.
"""

from __future__ import annotations

from functools import cache

from megalaunch.plan import rules as _all_rules  # noqa: F401  (registers them)
from megalaunch.plan.rules.registry import RULES, Rule, RuleContext
from megalaunch.schema import RunSpec

LAYOUT_RULE_MODULES = (
    "parallel",
    "tensor",
    "stages",
    "pipeline",
    "context",
    "data_blend",
    "moe",
    "mtp",
    "batch",
    "recompute",
)
"""Modules of plan/rules whose rules read the degrees, the split of layers, the micro batch or recomputation."""

_BATCH_RULE_MODULES = ("batch", "pipeline", "recompute", "data_blend")
"""The modules among them that read the micro batch or recomputation."""


def first_violated_rule(spec: RunSpec) -> str | None:
    """Return the id of the first rule that a layout violates, or None."""
    return _first(spec, _rules_for(LAYOUT_RULE_MODULES))


def first_violated_batch_rule(spec: RunSpec) -> str | None:
    """Return the same after a change of only micro batch and recomputation."""
    return _first(spec, _rules_for(_BATCH_RULE_MODULES))


def _first(spec: RunSpec, rules: tuple[Rule, ...]) -> str | None:
    at = RuleContext(spec)
    for rule in rules:
        if any(item.severity == "error" for item in rule.check(at)):
            return rule.id
    return None


@cache
def _rules_for(modules: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(entry for entry in RULES.values() if entry.check.__module__.rpartition(".")[2] in modules)
