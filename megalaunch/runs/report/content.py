"""Read what a report shows of one run from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalaunch.launch.run_state import throughput_basis
from megalaunch.plan.batch import tokens_per_step
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step, directory_size
from megalaunch.rundir.expert_load import ExpertLoadHistory, read_expert_load
from megalaunch.rundir.jsonl import Record, read_lines
from megalaunch.rundir.metrics import is_task_evaluation, is_validation
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.catalog.local_checkpoints import LocalCheckpointInfo, local_checkpoints
from megalaunch.runs.catalog.summarize import RunSummary, summarize_run
from megalaunch.runs.report.settings import Setting, list_settings
from megalaunch.runs.report.timeline import Launch, read_timeline
from megalaunch.schema import RunSpec
from megalaunch.schema.spec_file import read_spec

_SAMPLE_CHARACTERS = 4000


@dataclass(frozen=True)
class RunContent:
    """What a report shows of a run.

    `steps`, `validations` and `evaluations` (of tasks) are lines of metrics.jsonl.
    `checkpoints`: (step, bytes), the newest first; `local_checkpoints`: those on the machine of the report.
    `mfu`: the model FLOP/s utilization at the median speed, 0 to 1; None where the chip's peak is not known.
    """

    name: str
    spec: RunSpec
    summary: RunSummary
    steps: Sequence[Record]
    validations: Sequence[Record]
    evaluations: Sequence[Record]
    launches: Sequence[Launch]
    settings: Sequence[Setting]
    checkpoints: Sequence[tuple[int, int]]
    local_checkpoints: Sequence[LocalCheckpointInfo]
    expert_load: ExpertLoadHistory | None
    sample: str
    mfu: float | None


def read_content(directory: RunDirectory, name: str) -> RunContent:
    """Read a run. Raises SpecError or OSError if its spec.yaml cannot be read."""
    spec = read_spec(directory.spec)
    records = list(read_lines(directory.metrics))
    launches = read_timeline(read_lines(directory.events))
    summary = summarize_run(directory)
    return RunContent(
        name=name,
        spec=spec,
        summary=summary,
        steps=[record for record in records if "loss" in record],
        validations=[record for record in records if is_validation(record)],
        evaluations=[record for record in records if is_task_evaluation(record)],
        launches=launches,
        settings=list_settings(spec, launches[-1].overrides if launches else ()),
        checkpoints=[(step, directory_size(path)) for step, path in checkpoints_by_step(directory.checkpoints).items()],
        local_checkpoints=local_checkpoints(directory, spec),
        expert_load=read_expert_load(directory.expert_load),
        sample=_read_sample(directory),
        mfu=_utilization(spec, summary.figures.tokens_per_second),
    )


def _utilization(spec: RunSpec, tokens_per_second: float | None) -> float | None:
    basis = throughput_basis(spec)
    if not basis.peak_flops or not tokens_per_second:
        return None
    step_seconds = tokens_per_step(spec) / tokens_per_second
    return basis.step_flops / step_seconds / basis.devices / basis.peak_flops


def _read_sample(directory: RunDirectory) -> str:
    try:
        return directory.sample.read_text(encoding="utf-8", errors="replace")[:_SAMPLE_CHARACTERS]
    except OSError:
        return ""
