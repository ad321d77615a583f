"""Composes and checks the points of a sweep before anything starts, and says why one is left out."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.cli.corpus_findings import corpus_findings
from megalaunch.config.axes import Values
from megalaunch.config.compose import Composer, Composition
from megalaunch.config.errors import ConfigError
from megalaunch.config.schema import RunSpec, with_values
from megalaunch.config.schema.data import DataSpec
from megalaunch.config.sweep_words import SweepWords
from megalaunch.launch.sweep.folder import SweepFolder
from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding
from megalaunch.plan.resolve import machine_mismatch, resolve
from megalaunch.plan.rules.nearby import no_fixes
from megalaunch.platform.detect import Machine


@dataclass(frozen=True)
class Judged:
    """One point: its resolved spec and composition, or the findings for which it is left out."""

    number: int
    values: Values
    spec: RunSpec | None
    composition: Composition | None
    reasons: tuple[Finding, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    @property
    def reason(self) -> str:
        """Why it is left out, in one line."""
        return "; ".join(f"{finding.rule}: {finding.message}" for finding in self.reasons)

    @property
    def label(self) -> str:
        """What sets it apart, as words."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())


class Judge:
    """Judges points one by one; of points that come to the same run, only the first may run.

    `starts`: the trials start on this machine now, so it must have what they need.
    """

    def __init__(self, words: SweepWords, folder: SweepFolder, machine: Machine, starts: bool) -> None:
        self._words, self._folder, self._machine, self._starts = words, folder, machine, starts
        self._composer = Composer()
        self._seen: dict[RunSpec, int] = {}
        self._corpora: dict[DataSpec, list[Finding]] = {}

    def judge(self, number: int, values: Values) -> Judged:
        """Compose, resolve and check one point."""
        trial = self._folder.trial(number)
        named = (f"run.name={self._folder.root.name}_{trial.root.name}", f"run.directory={trial.root}")
        try:
            composition = self._composer.compose([*self._words.point(values), *named])
        except ConfigError as error:
            reasons = [Finding("config.schema", "error", p.path, p.message, origin=p.where) for p in error.problems]
            return Judged(number, values, None, None, tuple(reasons))
        spec = resolve(composition.spec, self._machine, composition.choices.get("recipe")).spec
        with no_fixes():  # a sweep has other points
            findings = check(spec, composition.origins, "train", self._machine if self._starts else None)
        findings += self._of_corpus(spec, composition)
        if self._starts:
            findings += machine_mismatch(spec, self._machine)
        else:  # a dry run: other machines may start it
            findings = [finding for finding in findings if finding.rule != "launcher.multi_node"]
        errors = [finding for finding in findings if finding.severity == "error"]
        if not errors:
            errors = [finding for finding in (self._repeated(number, spec),) if finding]
        return Judged(number, values, spec, composition, tuple(errors))

    def _of_corpus(self, spec: RunSpec, composition: Composition) -> list[Finding]:
        """What is said of the corpus, which most points share and is looked at once."""
        if spec.data not in self._corpora:
            self._corpora[spec.data] = corpus_findings(spec, composition.origins)
        return self._corpora[spec.data]

    def _repeated(self, number: int, spec: RunSpec) -> Finding | None:
        nameless = with_values(spec, {"run.name": None, "run.directory": None})
        first = self._seen.setdefault(nameless, number)
        if first == number:
            return None
        return Finding("sweep.repeated", "error", "sweep", f"comes to the same run as point {first}", {"point": first})
