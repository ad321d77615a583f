"""Compose and check the points of a sweep before a trial starts, with the reasons why points are skipped."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.compose import Composer, Composition
from megalaunch.config.errors import ConfigError
from megalaunch.config.schema import RunSpec, with_values
from megalaunch.config.schema.data import DataSpec
from megalaunch.config.search_space import Values
from megalaunch.config.sweep_overrides import SweepOverrides
from megalaunch.launch.sweep.directory import SweepFolder
from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding
from megalaunch.plan.resolve import machine_mismatch, resolve
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.platform.detect import Machine
from megalaunch.runs.corpus_check import check_corpus


@dataclass(frozen=True)
class ValidatedPoint:
    """One point: its resolved spec and composition, or the findings for which it is skipped."""

    number: int
    values: Values
    spec: RunSpec | None
    composition: Composition | None
    reasons: tuple[Finding, ...] = ()

    @property
    def is_valid(self) -> bool:
        """True without findings against the point."""
        return not self.reasons

    @property
    def reason(self) -> str:
        """Why the point is skipped, in one line."""
        return "; ".join(f"{finding.rule}: {finding.message}" for finding in self.reasons)

    @property
    def label(self) -> str:
        """The point's overrides."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())


class PointValidator:
    """Validates points one by one; of points with equal specs, only the first is valid.

    `starts`: the trials start on this machine now, so it must match the spec.
    """

    def __init__(self, overrides: SweepOverrides, folder: SweepFolder, machine: Machine, starts: bool) -> None:
        self._words, self._folder, self._machine, self._starts = overrides, folder, machine, starts
        self._composer = Composer()
        self._seen: dict[RunSpec, int] = {}
        self._corpora: dict[DataSpec, list[Finding]] = {}

    def validate(self, number: int, values: Values) -> ValidatedPoint:
        """Compose, resolve and check one point."""
        trial = self._folder.trial(number)
        named = (f"run.name={self._folder.root.name}_{trial.root.name}", f"run.directory={trial.root}")
        try:
            composition = self._composer.compose([*self._words.point(values), *named])
        except ConfigError as error:
            reasons = [Finding("config.schema", "error", p.path, p.message, origin=p.where) for p in error.problems]
            return ValidatedPoint(number, values, None, None, tuple(reasons))
        spec = resolve(composition.spec, self._machine, composition.choices.get("recipe")).spec
        with suggestions_disabled():  # a sweep tries other values anyway
            findings = check(spec, composition.origins, "train", self._machine if self._starts else None)
        findings += self._corpus_reason(spec, composition)
        if self._starts:
            findings += machine_mismatch(spec, self._machine)
        else:  # a dry run: the sweep may start on other machines
            findings = [finding for finding in findings if finding.rule != "launcher.multi_node"]
        errors = [finding for finding in findings if finding.severity == "error"]
        if not errors:
            errors = [finding for finding in (self._duplicate_reason(number, spec),) if finding]
        return ValidatedPoint(number, values, spec, composition, tuple(errors))

    def _corpus_reason(self, spec: RunSpec, composition: Composition) -> list[Finding]:
        """Return the findings about the corpus; checked once, since most points share it."""
        if spec.data not in self._corpora:
            self._corpora[spec.data] = check_corpus(spec, composition.origins)
        return self._corpora[spec.data]

    def _duplicate_reason(self, number: int, spec: RunSpec) -> Finding | None:
        """Return a finding if an earlier point has the same spec."""
        nameless = with_values(spec, {"run.name": None, "run.directory": None})
        first = self._seen.setdefault(nameless, number)
        if first == number:
            return None
        return Finding("sweep.repeated", "error", "sweep", f"comes to the same run as point {first}", {"point": first})
