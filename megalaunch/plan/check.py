"""Check a spec: run every rule, sort the findings, and verify each fix before it is shown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megalaunch.plan import rules as _all_rules  # noqa: F401  (registers them)
from megalaunch.plan.cluster import found_cluster
from megalaunch.plan.findings import Finding, as_override, sort_findings
from megalaunch.plan.overrides import override_findings
from megalaunch.plan.resolve import OPEN_VALUES, derive
from megalaunch.plan.rules.registry import RULES, Fix, Purpose, RuleContext, Violation
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine
from megalaunch.schema import RunSpec, SpecError, with_values
from megalaunch.schema.paths import value_at, with_value

MAX_FIXES = 3
_PROOFS = 12  # candidates verified per finding

_MORE_MACHINES = "launcher.multi_node"  # says how to start a run of several nodes, and is no reason against them

_Key = tuple[str, str]  # rule and path: they identify a finding


class HasOrigin(Protocol):
    """The source of a value (`config.compose.Origin`)."""

    @property
    def kind(self) -> str:
        """default, group, recipe or command line."""
        ...

    @property
    def where(self) -> str:
        """A position in a file, an option, or the command line."""
        ...

    @property
    def open(self) -> bool:
        """True for a value that is null or auto there, so that it was derived."""
        ...


def check(
    spec: RunSpec,
    origins: Mapping[str, HasOrigin] | None = None,
    purpose: Purpose = "validate",
    machine: Machine | None = None,
) -> list[Finding]:
    """Return all findings on a resolved spec, errors first. Never raises.

    Args:
        origins: the sources of values. Values that were open (null or auto) are derived again when a fix is verified;
            without origins, a value that equals its derived value counts as open.
        purpose: "train" for a run that is about to start.
        machine: the machine whose resources are checked; None: unknown.
    """
    at = RuleContext(spec, purpose, machine)
    broken = _run_rules(at)
    known = {key for key, item in broken if item.severity != "note"}
    open_spec = _with_derived_open(at, origins) if any(item.fixes for _, item in broken) else spec
    findings = []
    for (rule_id, path), item in broken:
        prover = _Prover((rule_id, path), at, open_spec, known)
        fixes = _verified_fixes(item, prover) if item.fixes else ()
        origin = origins.get(path) if origins else None
        where = origin.where if origin and origin.kind != "default" else ""
        findings.append(Finding(rule_id, item.severity, path, item.message, item.numbers, fixes, where))
    return sort_findings([*findings, *override_findings(spec)])


def _run_rules(at: RuleContext) -> list[tuple[_Key, Violation]]:
    return [((entry.id, item.path), item) for entry in RULES.values() for item in entry.check(at)]


def _verified_fixes(item: Violation, prover: _Prover) -> tuple[str, ...]:
    """Return the first fixes that remove the finding and add no error or warning, as overrides quoted for a shell."""
    shown: list[Fix] = []
    for candidate in _first(item.fixes, _PROOFS):
        fix = {path: value for path, value in candidate.items() if value_at(prover.open_spec, path) != value}
        more_than_needed = any(smaller.items() <= fix.items() for smaller in shown)
        proven = prover.prove(fix) if fix and not more_than_needed else None
        if proven is not None:
            shown.append(proven)
            if len(shown) == MAX_FIXES:
                break
    return tuple(shlex.join(f"{path}={as_override(value)}" for path, value in fix.items()) for fix in shown)


def _first(fixes: Iterable[Fix], count: int) -> list[Fix]:
    return [fix for fix, _ in zip(fixes, range(count), strict=False)]


@dataclass(frozen=True)
class _Prover:
    """Proves fixes of one finding, `key`.

    Attributes:
        at: the checked spec.
        open_spec: the spec with its derived values open again, an assumed cluster too.
        known: the errors and warnings of the spec; a fix may leave them.
    """

    key: _Key
    at: RuleContext
    open_spec: RunSpec
    known: set[_Key]

    def prove(self, fix: Fix) -> Fix | None:
        """Return a fix that removes the finding and adds none; None if it does not.

        Where the nodes are assumed, the fix may assume others; unless it is valid on both, it then names its own.
        """
        fixed = self._fixed(fix)
        if fixed is None or not self._is_valid(fixed):
            return None
        moved = self._moved(fixed)
        if moved.keys() <= fix.keys():
            return fix
        stays = self._fixed({**{path: value_at(self.at.spec, path) for path in moved}, **fix})
        return fix if stays is not None and self._is_valid(stays) else {**fix, **moved}

    def _moved(self, fixed: RunSpec) -> dict[str, Any]:
        """Return the nodes and devices that differ; workers on a CPU always follow the layout."""
        chip = CHIPS.get(fixed.platform.chip)
        if chip is not None and chip.device == "cpu":
            return {}
        here, there = vars(self.at.spec.cluster), vars(fixed.cluster)
        return {f"cluster.{name}": there[name] for name in here if here[name] != there[name]}

    def _fixed(self, fix: Fix) -> RunSpec | None:
        try:
            return derive(with_values(self.open_spec, fix))[0]
        except SpecError:  # a candidate outside the limits of the schema
            return None

    def _is_valid(self, fixed: RunSpec) -> bool:
        at = replace(self.at, spec=fixed)
        rule_id, path = self.key
        with suggestions_disabled():
            if any(item.path == path for item in RULES[rule_id].check(at)):  # most invalid candidates are rejected here
                return False
            return all(
                item.severity == "note" or (entry.id, item.path) in self.known or entry.id == _MORE_MACHINES
                for entry in RULES.values()
                for item in entry.check(at)
            )


def _with_derived_open(at: RuleContext, origins: Mapping[str, HasOrigin] | None) -> RunSpec:
    """Return the spec with its derived values open again, so that a fix changes them too."""
    spec = _with_open_cluster(at, origins)
    if origins is not None:
        return with_values(spec, {path: value for path, value in OPEN_VALUES.items() if origins[path].open})
    derived = derive(spec)[0]  # also that of each spec that replaces this one
    for path, value in OPEN_VALUES.items():
        opened = with_values(spec, {path: value})
        if path != "batch.micro_batch_size" and derive(opened)[0] == derived:
            spec = opened
    return spec


def _with_open_cluster(at: RuleContext, origins: Mapping[str, HasOrigin] | None) -> RunSpec:
    """Open the nodes and devices that were assumed; those that a machine or an allocation has stay."""
    keys = [key for key in ("cluster.nodes", "cluster.devices_per_node") if origins is None or origins[key].open]
    opened = with_value(at.spec, dict.fromkeys(keys, "auto"))
    if at.machine is not None and found_cluster(opened, at.machine):
        return at.spec
    return opened if derive(opened)[0].cluster == at.spec.cluster else at.spec
