"""Run inference with a model sharded over local workers: check the layout, start workers, stream their results."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from megalaunch.engine.api import Job, ModelSource
    from megalaunch.launch.run_state import RunState
    from megalaunch.launch.stop import StopSignals
    from megalaunch.launch.supervise import LaunchResult
    from megalaunch.platform.detect import Machine
    from megalaunch.schema import RunSpec
    from megalaunch.schema.parallel import ParallelSpec

WORKER_MODULE = "megalaunch.engine.inference_worker"
_PLANNED_LENGTH = 4096  # tokens, for a text of unknown length
_MICROBATCHES = 4  # per stage: enough for the rules of every schedule; inference runs none


def run_distributed(source: Path, overrides: Sequence[str], job: Job, take: Callable[[Any], None]) -> None:
    """Run a job with the layout of the overrides; warnings are printed to standard error.

    Ends the command if the layout, the job or a worker fails.

    Args:
        take: called with each result as it arrives.

    Raises:
        CheckpointError, NotADirectoryError: as `open_model`.
        ValueError: a prompt is invalid.
        OSError: raised by `take`.
    """
    from megalaunch.engine import api
    from megalaunch.launch.directory import RunDirectoryError
    from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
    from megalaunch.platform.detect import detect_machine
    from megalaunch.runs.errors import fail, refuse

    layout = _layout(overrides)
    opened = api.open_source(source, lambda message: typer.echo(message, err=True))
    if isinstance(job, api.GenerateJob):  # before workers load the model
        source_of_tokens = replace(opened, add_special_tokens=False) if job.no_bos else opened
        api.validate_prompts(source_of_tokens, job.prompts, job.request)
    machine = detect_machine()
    directory = RunDirectory(Path(tempfile.mkdtemp(prefix="megalaunch-")))
    crashed = False
    try:
        with StopSignals() as stop:
            spec = _check_spec(_spec(opened, layout, job, directory), machine)
            display = _InferenceDisplay(directory, take)
            try:
                api.write_job(directory, job)
                end = run_workers(spec, directory, overrides, machine, stop, display)
            except (OSError, RunDirectoryError) as error:
                fail(f"the temporary directory cannot be written: {error}\nfix:  set TMPDIR to a disk with free space")
        if display.error is not None:
            raise display.error
        crashed = _is_crash(end)
        _conclude(spec, directory, end)
    except StopBeforeLaunch as stopped:
        refuse("", stopped.exit_code)
    finally:
        if not crashed:  # after a crash the report names logs in it
            shutil.rmtree(directory.root, ignore_errors=True)


def _layout(overrides: Sequence[str]) -> ParallelSpec:
    """Return the `parallel` section of the overrides; end the command for other overrides or an invalid layout."""
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.report import problems_text
    from megalaunch.runs.errors import fail, refuse

    for override in overrides:
        key = override.partition("=")[0]
        if key != "parallel" and not key.startswith("parallel."):
            fail(
                f"{override!r} does not set the layout: only overrides of `parallel`, such as parallel=tp2pp2, may "
                "follow the model's path"
            )
    try:
        return compose(["recipe=tiny", *overrides]).spec.parallel  # only its parallel section is used
    except ConfigError as error:
        refuse(problems_text(error.problems))


def _spec(source: ModelSource, layout: ParallelSpec, job: Job, directory: RunDirectory) -> RunSpec:
    """Build the spec of an inference job: model and layout, without training settings."""
    from megalaunch.engine import api
    from megalaunch.schema import build_run_spec

    stored, dp = source.spec, layout.dp or 1
    model, data = stored.model, stored.data
    if isinstance(job, api.GenerateJob):
        unit = 2 * layout.tp * layout.cp  # divisible by tp and cp; the text's own length need not be
        length = max(1, min(model.max_position_embeddings, _PLANNED_LENGTH) // unit) * unit
    else:
        length = job.sequence_length or stored.batch.sequence_length
    return build_run_spec(
        {
            "model": asdict(model),
            "parallel": {**asdict(layout), "dp": dp},
            "cluster": {"nodes": 1, "devices_per_node": layout.tp * layout.pp * layout.cp * dp},
            "precision": {
                "compute_dtype": _inference_dtype(stored),
                "residual_dtype": stored.precision.residual_dtype,
            },
            "batch": {
                "sequence_length": length,
                "micro_batch_size": 1,
                "global_batch_size": dp * layout.pp * _MICROBATCHES,
            },
            "train": {"steps": 1},
            "data": {
                "mock": True,
                "reset_position_ids": data.reset_position_ids,
                "reset_attention_mask": data.reset_attention_mask,
                "eod_mask_loss": data.eod_mask_loss,
            },
            "checkpoint": {"load_pretrained": str(source.checkpoint.absolute())},
            "launcher": {"max_restarts": 0, "stop_grace_period": 1.0, "preflight": False},
            "run": {"name": "text", "directory": str(directory.root)},
        }
    )


def _inference_dtype(stored: RunSpec) -> str:
    """Return the dtype of inference: bf16 for a model trained in fp8, whose weights are not quantised."""
    dtype = stored.precision.compute_dtype
    return "bf16" if dtype == "fp8" else dtype


def _check_spec(spec: RunSpec, machine: Machine) -> RunSpec:
    """Return the resolved spec; end the command for a layout that the model, engine or machine does not support."""
    from megalaunch.plan.check import check
    from megalaunch.plan.report import findings_text
    from megalaunch.plan.resolve import machine_mismatch, resolve
    from megalaunch.runs.errors import refuse
    from megalaunch.schema.paths import with_value

    if machine.chip.device == "cpu":  # as in a single process: decoding one token at a time is memory-bound
        spec = with_value(spec, {"precision.compute_dtype": "fp32"})
    spec = resolve(spec, machine, None).spec
    findings = [*check(spec, None, "train"), *machine_mismatch(spec, machine)]
    # The memory model predicts training, not inference.
    errors = [finding for finding in findings if finding.severity == "error" and not finding.rule.startswith("memory.")]
    if errors:
        refuse(findings_text([replace(error, fixes=tuple(filter(_is_parallel_fix, error.fixes))) for error in errors]))
    return spec


def _is_parallel_fix(fix: str) -> bool:
    return all(override.startswith("parallel.") for override in fix.split())


class _InferenceDisplay:
    """Passes on the workers' results. A closed output pipe stops the workers."""

    def __init__(self, directory: RunDirectory, take: Callable[[Any], None]) -> None:
        from megalaunch.engine import api
        from megalaunch.rundir.tail import JsonlTail

        self._lines, self._take = JsonlTail(api.answers_file(directory)), take
        self._answer_of, self._note = api.from_record, api.JobWarning
        self.error: OSError | None = None

    def say(self, line: str) -> None:
        """Do nothing: only results are shown."""

    def update(self, view: RunState) -> None:
        """Pass on new results; print warnings to standard error."""
        records, _ = self._lines.read_new()
        try:
            for record in records if self.error is None else []:
                answer = self._answer_of(record)
                if isinstance(answer, self._note):
                    typer.echo(answer.message, err=True)
                else:
                    self._take(answer)
        except OSError as error:
            self.error = error
            signal.raise_signal(signal.SIGTERM)  # the launcher forwards it to the workers

    def close(self) -> None:
        """Do nothing: every result is shown when it arrives."""


def run_workers(
    spec: RunSpec,
    directory: RunDirectory,
    overrides: Sequence[str],
    machine: Machine,
    stop: StopSignals,
    display: _InferenceDisplay,
) -> LaunchResult:
    """Start the workers of a resolved spec, and pass on their results until they end."""
    from megalaunch.launch.directory import lock_run, unlock_run
    from megalaunch.launch.local import Launch, run_locally
    from megalaunch.launch.run_state import throughput_basis

    lock = lock_run(directory)
    try:
        launch = Launch(spec, directory, lock, overrides, throughput_basis(spec), machine.cores, WORKER_MODULE)
        return run_locally(launch, stop, lambda view: display)
    finally:
        unlock_run(directory, lock)


# Outcomes that print only the reason, without a failure report.
_WITHOUT_REPORT = (ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.CHECKPOINT)
_NEXT = "read the log; run the same command to try again"
_STOPPED = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)


def _is_crash(end: LaunchResult) -> bool:
    return end.outcome.exit_code not in (ExitCode.DONE, *_WITHOUT_REPORT, *_STOPPED)


def _conclude(spec: RunSpec, directory: RunDirectory, end: LaunchResult) -> None:
    """Return if the job is done, else end the command with the worker's exit code."""
    from megalaunch.launch.display.report import failure_report
    from megalaunch.runs.errors import fail, refuse

    code = end.outcome.exit_code
    if code == ExitCode.DONE:
        return
    if _is_crash(end):
        refuse("\n".join(failure_report(spec, directory, end, _NEXT)), ExitCode(code))
    if code in _WITHOUT_REPORT:
        fail(end.outcome.reason, ExitCode(code))
    refuse("", ExitCode(code))
