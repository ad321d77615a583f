"""A language model over several workers of this machine: its layout is checked, they are started, they answer."""

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
    from megalaunch.config.schema import RunSpec
    from megalaunch.config.schema.parallel import ParallelSpec
    from megalaunch.engine.api import Job, ModelSource
    from megalaunch.launch.run_state import RunState
    from megalaunch.launch.stop import StopSignals
    from megalaunch.launch.supervise import LaunchResult
    from megalaunch.platform.detect import Machine

WORKER_MODULE = "megalaunch.engine.inference.worker"
_PLANNED_LENGTH = 4096  # of a text whose length is not known before
_MICROBATCHES = 4  # for each stage: enough for every schedule's rules; none of them is run


def run_distributed(source: Path, overrides: Sequence[str], job: Job, take: Callable[[Any], None]) -> None:
    """Have a job done under the layout of the words; `take` gets each answer as it comes, notes go to standard error.

    Ends the command where the layout, the job or a worker fails. Raises CheckpointError and NotADirectoryError as
    `open_model` does, ValueError for prompts that cannot be, and the OSError of `take`.
    """
    from megalaunch.engine import api
    from megalaunch.launch.directory import RunDirectoryError
    from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
    from megalaunch.platform.detect import detect_machine
    from megalaunch.runs.errors import fail, refuse

    layout = _layout(overrides)
    opened = api.open_source(source, lambda message: typer.echo(message, err=True))
    if isinstance(job, api.GenerateJob):  # before workers load anything
        source_of_tokens = replace(opened, add_special_tokens=False) if job.no_bos else opened
        api.validate_prompts(source_of_tokens, job.prompts, job.ask)
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
                fail(f"the workers' folder cannot be written: {error}\nfix:  let TMPDIR name a disk with space")
        if display.error is not None:
            raise display.error
        crashed = _is_crash(end)
        _conclude(spec, directory, end)
    except StopBeforeLaunch as stopped:
        refuse("", stopped.exit_code)
    finally:
        if not crashed:  # else the logs that the report names are there
            shutil.rmtree(directory.root, ignore_errors=True)


def _layout(overrides: Sequence[str]) -> ParallelSpec:
    """What the words say of `parallel`; refuses other words, and what is no layout."""
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.report import problems_text
    from megalaunch.runs.errors import fail, refuse

    for override in overrides:
        key = override.partition("=")[0]
        if key != "parallel" and not key.startswith("parallel."):
            fail(
                f"{override!r} says nothing about the layout: the model is as it was saved, "
                "and only words such as parallel=tp2pp2 may follow its path"
            )
    try:
        return compose(["recipe=tiny", *overrides]).spec.parallel  # the recipe stands in for what the model tells
    except ConfigError as error:
        refuse(problems_text(error.problems))


def _spec(source: ModelSource, layout: ParallelSpec, job: Job, directory: RunDirectory) -> RunSpec:
    """A spec of the model under the layout, for workers that only look: nothing of how it was trained is in it."""
    from megalaunch.config.schema import build_run_spec
    from megalaunch.engine import api

    stored, dp = source.spec, layout.dp or 1
    model, data = stored.model, stored.data
    if isinstance(job, api.GenerateJob):
        unit = 2 * layout.tp * layout.cp  # so that ranks could share it; a text's own length is free
        length = max(1, min(model.max_position_embeddings, _PLANNED_LENGTH) // unit) * unit
    else:
        length = job.sequence_length or stored.batch.sequence_length
    return build_run_spec(
        {
            "model": asdict(model),
            "parallel": {**asdict(layout), "dp": dp},
            "cluster": {"devices_per_node": layout.tp * layout.pp * layout.cp * dp},
            "precision": {
                "compute_dtype": stored.precision.compute_dtype,
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
            "launcher": {"max_restarts": 0, "stop_grace_period": 1.0},
            "run": {"name": "text", "directory": str(directory.root)},
        }
    )


def _check_spec(spec: RunSpec, machine: Machine) -> RunSpec:
    """The resolved spec; refuses a layout that the model, the engine or this machine does not have."""
    from megalaunch.config.schema.paths import with_value
    from megalaunch.plan.check import check
    from megalaunch.plan.report import findings_text
    from megalaunch.plan.resolve import machine_mismatch, resolve
    from megalaunch.runs.errors import refuse

    if machine.chip.device == "cpu":  # as on one process: a token at a time is bound by memory
        spec = with_value(spec, {"precision.compute_dtype": "fp32"})
    spec = resolve(spec, machine, None).spec
    findings = [*check(spec, None, "train"), *machine_mismatch(spec, machine)]
    # The memory that is planned is that of training.
    wrong = [one for one in findings if one.severity == "error" and not one.rule.startswith("memory.")]
    if wrong:
        refuse(findings_text([replace(one, fixes=tuple(filter(_is_parallel_fix, one.fixes))) for one in wrong]))
    return spec


def _is_parallel_fix(fix: str) -> bool:
    return all(override.startswith("parallel.") for override in fix.split())


class _InferenceDisplay:
    """Hands the workers' answers on. An output that takes no more (a reader that left) ends the workers."""

    def __init__(self, directory: RunDirectory, take: Callable[[Any], None]) -> None:
        from megalaunch.engine import api
        from megalaunch.launch.tail import JsonlTail

        self._lines, self._take = JsonlTail(api.answers_file(directory)), take
        self._answer_of, self._note = api.from_record, api.Warning
        self.error: OSError | None = None

    def say(self, line: str) -> None:
        """Nothing but answers is shown."""

    def update(self, view: RunState) -> None:
        """Hand on what is new."""
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
            signal.raise_signal(signal.SIGTERM)  # which the launcher passes on

    def close(self) -> None:
        """All is shown as it comes."""


def run_workers(
    spec: RunSpec,
    directory: RunDirectory,
    overrides: Sequence[str],
    machine: Machine,
    stop: StopSignals,
    display: _InferenceDisplay,
) -> LaunchResult:
    """Start the workers of a resolved spec, and show their answers until they are done."""
    from megalaunch.launch.directory import lock_run, unlock_run
    from megalaunch.launch.local import Launch, run_locally
    from megalaunch.launch.run_state import throughput_basis

    lock = lock_run(directory)
    try:
        launch = Launch(spec, directory, lock, overrides, throughput_basis(spec), machine.cores, WORKER_MODULE)
        return run_locally(launch, stop, lambda view: display)
    finally:
        unlock_run(directory, lock)


_SAID = (ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.CHECKPOINT)  # the reason is all there is to say
_NEXT = "read the log; the same command tries again"
_STOPPED = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)


def _is_crash(end: LaunchResult) -> bool:
    return end.outcome.exit_code not in (ExitCode.DONE, *_SAID, *_STOPPED)


def _conclude(spec: RunSpec, directory: RunDirectory, end: LaunchResult) -> None:
    """Return where all is answered, else end the command."""
    from megalaunch.launch.report import failure_report
    from megalaunch.runs.errors import fail, refuse

    code = end.outcome.exit_code
    if code == ExitCode.DONE:
        return
    if _is_crash(end):
        refuse("\n".join(failure_report(spec, directory, end, _NEXT)), ExitCode(code))
    if code in _SAID:
        fail(end.outcome.reason, ExitCode(code))
    refuse("", ExitCode(code))
