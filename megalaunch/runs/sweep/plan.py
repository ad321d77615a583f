"""Plan a sweep: compose and check all points before the first trial starts, with the reasons why points are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from megalaunch.config.compose import Composer, Composition
from megalaunch.config.errors import ConfigError
from megalaunch.config.search_space import Values
from megalaunch.hub.name import HubError
from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding
from megalaunch.plan.report import finding_line, problems_as_findings
from megalaunch.plan.resolve import machine_mismatch, resolve
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.platform.detect import Machine, detect_machine
from megalaunch.runs.branch import check_branch, pin_branch
from megalaunch.runs.corpus_check import check_corpus
from megalaunch.runs.hub_names import pin_hub_names
from megalaunch.runs.sweep.folder import Definition, Metric, Sampler, SweepFolder
from megalaunch.runs.sweep.overrides import SweepOverrides
from megalaunch.runs.sweep.sampling import grid, random_points
from megalaunch.schema import RunSpec, SpecProblem, with_values
from megalaunch.schema.data import DataSpec

MOST_POINTS = 10_000
"""Of a grid that is validated whole: a point takes some milliseconds."""

_DRAWS_PER_TRIAL = 20  # draws per requested trial, invalid points included
_SHOWN_POINTS = 500  # of a grid with --trials: beyond, it ends with the last point that runs


@dataclass(frozen=True)
class ValidatedPoint:
    """One point: its resolved spec and composition with warnings, or the findings for which it is skipped."""

    number: int
    values: Values
    spec: RunSpec | None
    composition: Composition | None
    reasons: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()

    @property
    def is_valid(self) -> bool:
        """True without findings against the point."""
        return not self.reasons

    @property
    def reason(self) -> str:
        """Why the point is skipped, in one line."""
        return "; ".join(map(finding_line, self.reasons))

    @property
    def label(self) -> str:
        """The point's overrides."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())


class PointValidator:
    """Validates points one by one; of points with equal specs, only the first is valid.

    `starts`: the trials start on this machine now, so it must match the spec.
    """

    def __init__(self, overrides: SweepOverrides, folder: SweepFolder, machine: Machine, starts: bool) -> None:
        self._overrides, self._folder, self._machine, self._starts = overrides, folder, machine, starts
        self._composer = Composer()
        self._seen: dict[RunSpec, int] = {}
        self._corpora: dict[DataSpec, list[Finding]] = {}

    def validate(self, number: int, values: Values) -> ValidatedPoint:
        """Compose, resolve and check one point."""
        trial = self._folder.trial(number)
        named = (f"run.name={self._folder.root.name}_{trial.root.name}", f"run.directory={trial.root}")
        try:
            composition = self._composer.compose([*self._overrides.point(values), *named])
        except ConfigError as error:
            return ValidatedPoint(number, values, None, None, tuple(problems_as_findings(error.problems)))
        resolution = resolve(composition.spec, self._machine, composition.choices.get("recipe"))
        try:
            spec = pin_branch(pin_hub_names(resolution.spec, composition.choices.get("model", "")))
        except HubError as error:
            problem = SpecProblem("sweep", f"{error.cause}; {error.fix}")
            return ValidatedPoint(number, values, None, None, tuple(problems_as_findings([problem])))
        with suggestions_disabled():  # a sweep tries other values anyway
            findings = check(spec, composition.origins, "train", self._machine if self._starts else None)
        findings += [*resolution.notes, *problems_as_findings(composition.repeated, "warning")]
        findings += self._corpus_reason(spec, composition)
        findings += check_branch(spec, begun=bool(trial.checkpoints.is_dir() and any(trial.checkpoints.iterdir())))
        findings += self._launcher_reason(spec)
        if self._starts:
            findings += machine_mismatch(spec, self._machine, composition.spec.platform.chip == "auto")
        else:  # a dry run: the sweep may start on other machines
            findings = [finding for finding in findings if finding.rule != "launcher.multi_node"]
        errors = [finding for finding in findings if finding.severity == "error"]
        if not errors:
            errors = [finding for finding in (self._duplicate_reason(number, spec),) if finding]
        warnings = tuple(finding for finding in findings if finding.severity == "warning")
        return ValidatedPoint(number, values, spec, composition, tuple(errors), warnings)

    def _corpus_reason(self, spec: RunSpec, composition: Composition) -> list[Finding]:
        """Return the findings about the corpus; checked once, since most points share it."""
        if spec.data not in self._corpora:
            self._corpora[spec.data] = check_corpus(spec, composition.origins)
        return self._corpora[spec.data]

    def _launcher_reason(self, spec: RunSpec) -> list[Finding]:
        """Return an error if a trial needs several nodes of a launcher."""
        name, nodes = spec.launcher.name, spec.cluster.nodes
        if name == "local" or self._machine.allocation is not None or nodes == 1:
            return []
        message = f"launcher={name} runs trials of one node"
        return [Finding("sweep.launcher", "error", "launcher.name", message, fixes=("launcher=local",))]

    def _duplicate_reason(self, number: int, spec: RunSpec) -> Finding | None:
        """Return a finding if an earlier point has the same spec."""
        unnamed = with_values(spec, {"run.name": None, "run.directory": None})
        first = self._seen.setdefault(unnamed, number)
        if first == number:
            return None
        return Finding("sweep.repeated", "error", "sweep", f"the same run as point {first}", {"point": first})


@dataclass(frozen=True)
class Request:
    """The settings of a sweep; `trials` None: all points."""

    overrides: SweepOverrides
    name: str
    sampler: Sampler
    metric: Metric
    trials: int | None
    seed: int
    retry_failed: bool

    @property
    def folder(self) -> SweepFolder:
        """The sweep's folder, `sweeps/<name>`."""
        return SweepFolder(Path("sweeps") / self.name)

    @property
    def definition(self) -> Definition:
        """The settings that must be equal when the sweep is continued."""
        return Definition(self.overrides.typed, self.sampler, self.seed, self.metric)


@dataclass(frozen=True)
class PlannedSweep:
    """The points known before the start; tpe proposes its own during the sweep, validated by the same `validator`.

    Attributes:
        sample: for tpe, a random point, which does not run; its warnings are shown before the start.
    """

    request: Request
    machine: Machine
    validator: PointValidator
    points: list[ValidatedPoint] = field(default_factory=list)
    sample: ValidatedPoint | None = None

    @property
    def runnable(self) -> list[ValidatedPoint]:
        """The valid points, at most `trials`."""
        return list(islice((point for point in self.points if point.is_valid), self.request.trials))

    @property
    def elsewhere(self) -> bool:
        """Whether a launcher runs the trials on other machines."""
        spec = next((point.spec for point in [*self.runnable, self.sample] if point and point.spec), None)
        return spec is not None and spec.launcher.name != "local" and self.machine.allocation is None

    @property
    def skipped(self) -> list[ValidatedPoint]:
        """The points that cannot run."""
        return [point for point in self.points if not point.is_valid]

    @property
    def shared(self) -> tuple[Finding, ...]:
        """Findings common to all points, so not caused by a swept override; none if there is only one point."""
        return _common([point.reasons for point in self.points]) if len(self.points) > 1 else ()

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Warnings common to all points that run."""
        return _common([point.warnings for point in self.runnable or filter(None, [self.sample])])

    @property
    def reasons(self) -> Counter[str]:
        """The number of skipped points by rule; a point may break several rules."""
        return Counter(rule for point in self.skipped for rule in {finding.rule for finding in point.reasons})


def _common(findings: Sequence[Sequence[Finding]]) -> tuple[Finding, ...]:
    """Return the findings that every point has."""
    known = [{(finding.rule, finding.message) for finding in of_point} for of_point in findings]
    first = findings[0] if findings else ()
    return tuple(finding for finding in first if all((finding.rule, finding.message) in each for each in known))


def plan_sweep(request: Request, starts: bool) -> PlannedSweep:
    """Validate the points: of the grid, or random ones until enough are valid. For tpe: only in a dry run."""
    machine = detect_machine()
    planned = PlannedSweep(request, machine, PointValidator(request.overrides, request.folder, machine, starts))
    if request.sampler == "tpe" and starts:  # tpe proposes its points during the sweep
        sampler = PointValidator(request.overrides, request.folder, machine, starts)  # `validator` must not know it
        return replace(planned, sample=sampler.validate(1, next(_points(request))))
    wanted, is_grid, found = request.trials, request.sampler == "grid", 0
    draws = None if wanted is None or is_grid else _DRAWS_PER_TRIAL * wanted
    for number, values in enumerate(islice(_points(request), draws), 1):
        if wanted is not None and found >= wanted and not (is_grid and number <= _SHOWN_POINTS):
            break
        point = planned.validator.validate(number, values)
        planned.points.append(point)
        found += point.is_valid
    return planned


def _points(request: Request) -> Iterator[Values]:
    if request.sampler == "grid":
        return grid(request.overrides.axes)
    return random_points(request.overrides.axes, request.seed)
