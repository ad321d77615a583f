"""Report a sweep's points as text and JSON, before it starts and when it is over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megalaunch.format.numbers import format_counted
from megalaunch.format.table import table_lines
from megalaunch.plan.findings import Finding, as_json
from megalaunch.plan.report import COMPOSITION, finding_block, finding_line, rules_wait
from megalaunch.runs.sweep.display import figures, label
from megalaunch.runs.sweep.plan import PlannedSweep, ValidatedPoint
from megalaunch.runs.sweep.results import TrialResult, rank_results, unranked_reason

_WIDTH = 116
_BEST_SHOWN = 10


def dry_run_text(planned: PlannedSweep) -> str:
    """Return one line per point, then the counts."""
    running = {point.number for point in planned.runnable}
    shared = planned.shared
    rows = []
    for point in planned.points:
        text = "runs" if point.number in running else "not run: enough trials without it"
        rows.append((str(point.number), point.label, text if point.is_valid else _skip_reason(point, shared)))
    lines = [_truncate(line) for line in table_lines(rows, right=(0,))]
    return "\n".join([*lines, "", *counts(planned)])


def _skip_reason(point: ValidatedPoint, shared: Sequence[Finding]) -> str:
    """Return the first reason for which this point, and not all points, is skipped."""
    known = {(finding.rule, finding.message) for finding in shared}
    own = [finding for finding in point.reasons if (finding.rule, finding.message) not in known]
    if not own:
        return "no error of its own: only those of all points"
    more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
    return f"skipped{more}: {finding_line(own[0])}"


def _truncate(line: str) -> str:
    return line if len(line) <= _WIDTH + 40 else line[: _WIDTH + 37] + "..."


def counts(planned: PlannedSweep) -> list[str]:
    """Return the warnings, how many points run, and how many each rule excludes."""
    request = planned.request
    warnings = [line for finding in planned.warnings for line in (finding_block(finding), "")]
    ranking = f"each in a run directory below {request.folder.root}, ranked by {request.metric}"
    if request.sampler == "tpe" and not planned.points:
        return [*warnings, f"tpe proposes {request.trials} points during the sweep", ranking]
    total = len(planned.points)
    points = f"{total} point{'s' if total != 1 else ''}"
    uncomposed = {f.path + f.message for point in planned.skipped for f in point.reasons if f.rule == COMPOSITION}
    lines = [*warnings, f"{points}: {len(planned.runnable)} to run, {len(planned.skipped)} skipped"]
    lines += [f"  all points: {finding_line(finding)}" for finding in planned.shared]
    if planned.reasons:
        lines += table_lines(((str(count), rule) for rule, count in planned.reasons.most_common()), right=(0,))
    if uncomposed:
        lines.append(f"{format_counted(len(uncomposed), 'error')} of composition{rules_wait(len(uncomposed))}")
    if request.sampler == "tpe":
        lines.append(f"tpe proposes {request.trials} points during the sweep; the points above are a random sample")
    return [*lines, ranking]


def dry_run_json(planned: PlannedSweep) -> str:
    """Return one object: points with their reasons, and counts."""
    running = {point.number for point in planned.runnable}
    points = [
        {
            "number": point.number,
            "overrides": dict(point.values),
            "runs": point.number in running,
            "valid": point.is_valid,
            "reasons": [as_json(finding) for finding in point.reasons],
        }
        for point in planned.points
    ]
    summary = {**_head(planned), "reasons": dict(planned.reasons), "points": points}
    return json.dumps(summary, indent=2, default=str)


def _head(planned: PlannedSweep) -> dict[str, Any]:
    request = planned.request
    return {
        "name": request.name,
        "directory": str(request.folder.root),
        "sampler": request.sampler,
        "metric": request.metric,
        "to_run": len(planned.runnable),
        "skipped": len(planned.skipped),
        "warnings": [as_json(finding) for finding in planned.warnings],
    }


def results_text(planned: PlannedSweep, results: Sequence[TrialResult], files: Mapping[str, str]) -> str:
    """Return the best trials, the trials that are not ranked with their reasons, and the paths of the files."""
    metric = planned.request.metric
    order = rank_results(results, metric)
    lines = [f"{len(order)} of {format_counted(len(results), 'trial')} ranked by {metric}"]
    for place, result in enumerate(order[:_BEST_SHOWN], 1):
        lines.append(f"  {place:>3}. trial {result.number}: {label(result)}: {figures(result)}")
    if len(order) > _BEST_SHOWN:
        lines.append(f"       and {len(order) - _BEST_SHOWN} more")
    for result in results:
        if reason := unranked_reason(result, metric):
            lines.append(_truncate(f"    -  trial {result.number}: {label(result)}: {result.state}: {reason}"))
    if planned.skipped:
        count = len(planned.skipped)
        lines.append(f"  {format_counted(count, 'point')} skipped: {'it' if count == 1 else 'they'} cannot run")
    return "\n".join([*lines, *table_lines(files.items())])


def results_json(planned: PlannedSweep, results: Sequence[TrialResult], files: Mapping[str, str]) -> str:
    """Return one object: ranked trials first, then the others, then the skipped points."""
    metric = planned.request.metric
    order = rank_results(results, metric)
    place_of_trial = {result.number: place for place, result in enumerate(order, 1)}
    others = [result for result in results if result.number not in place_of_trial]
    trials = [
        {
            "rank": place_of_trial.get(result.number),
            "number": result.number,
            "overrides": dict(result.values),
            "state": result.state,
            "exit_code": result.exit_code,
            "reason": unranked_reason(result, metric),
            "tokens_per_second": vars(result.speed) if result.speed else None,
            "loss": result.loss,
            "validation_loss": result.validation_loss,
            "steps": result.steps,
            "directory": str(planned.request.folder.trial(result.number).root),
        }
        for result in [*order, *others]
    ]
    skipped = [
        {"number": p.number, "overrides": dict(p.values), "reasons": [as_json(f) for f in p.reasons]}
        for p in planned.skipped
    ]
    return json.dumps({**_head(planned), "files": dict(files), "trials": trials, "skipped_points": skipped}, indent=2)
