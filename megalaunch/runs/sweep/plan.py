"""Plan a sweep: compose and check all points before the first trial starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from megalaunch.config.search_space import Values
from megalaunch.config.sweep_overrides import SweepOverrides
from megalaunch.launch.sweep.directory import Definition, Metric, Sampler, SweepFolder
from megalaunch.launch.sweep.sampling import grid, random_points
from megalaunch.plan.findings import Finding
from megalaunch.platform.detect import Machine, detect_machine
from megalaunch.runs.sweep.validation import PointValidator, ValidatedPoint

_DRAWS_PER_TRIAL = 20  # draws per requested trial, invalid points included


@dataclass(frozen=True)
class Request:
    """The settings of a sweep; `trials` None: all points."""

    words: SweepOverrides
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
        return Definition(self.words.typed, self.sampler, self.seed, self.metric)


@dataclass(frozen=True)
class PlannedSweep:
    """The points known before the start; tpe proposes its own during the sweep, validated by the same `judge`."""

    request: Request
    machine: Machine
    judge: PointValidator
    judged: list[ValidatedPoint] = field(default_factory=list)

    @property
    def runnable(self) -> list[ValidatedPoint]:
        """The valid points, at most `trials`."""
        return list(islice((point for point in self.judged if point.is_valid), self.request.trials))

    @property
    def skipped(self) -> list[ValidatedPoint]:
        """The points that cannot run."""
        return [point for point in self.judged if not point.is_valid]

    @property
    def shared(self) -> tuple[Finding, ...]:
        """Findings common to all points, so not caused by a swept override; none if there is only one point."""
        if len(self.judged) < 2:
            return ()
        said = Counter((finding.rule, finding.message) for point in self.judged for finding in point.reasons)
        first = self.judged[0].reasons
        return tuple(finding for finding in first if said[finding.rule, finding.message] == len(self.judged))

    @property
    def reasons(self) -> Counter[str]:
        """The number of skipped points by rule; a point may break several rules."""
        return Counter(rule for point in self.skipped for rule in {finding.rule for finding in point.reasons})


def plan_sweep(request: Request, starts: bool) -> PlannedSweep:
    """Validate the points: of the full grid, or random ones until enough are valid. For tpe: only in a dry run."""
    machine = detect_machine()
    planned = PlannedSweep(request, machine, PointValidator(request.words, request.folder, machine, starts))
    if request.sampler == "tpe" and starts:
        return planned  # tpe proposes its points during the sweep
    wanted = request.trials if request.sampler != "grid" else None
    found = 0
    for number, values in enumerate(_points(request), 1):
        if wanted is not None and (found == wanted or number > _DRAWS_PER_TRIAL * wanted):
            break
        judged = planned.judge.validate(number, values)
        planned.judged.append(judged)
        found += judged.is_valid
    return planned


def _points(request: Request) -> Iterator[Values]:
    if request.sampler == "grid":
        return grid(request.words.axes)
    return random_points(request.words.axes, request.seed)
