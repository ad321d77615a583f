"""Rehearse a run from its overrides: check it as `train` does, shrink it, play every phase, report."""

from __future__ import annotations

import shlex
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.errors import fail, refuse
from megalaunch.runs.missing_devices import needed_devices, present_devices, run_elsewhere
from megalaunch.runs.rehearsal.shrink import Shrunk, shrink
from megalaunch.schema import RunSpec

if TYPE_CHECKING:
    from megalaunch.launch.stop import StopSignals
    from megalaunch.plan.findings import Finding
    from megalaunch.platform.detect import Machine
    from megalaunch.runs.rehearsal.phases import PhaseFailed

_NOT_NEEDED_HERE = frozenset(
    {
        "launcher.multi_node",
        "data.source",
        "data.tokens_exist",
        "data.corpus_exists",
        "tokenizer.path",
        "checkpoint.load_pretrained",
        "checkpoint.free_disk",
    }
)
"""Errors of a start that do not concern a rehearsal: it generates its data and plays other machines' ranks here."""


@dataclass(frozen=True)
class PreparedRehearsal:
    """A checked run and its shrunk spec."""

    run: RunSpec
    shrunk: Shrunk
    machine: Machine


def prepare_rehearsal(overrides: list[str]) -> PreparedRehearsal:
    """Compose, resolve and check a run and its rehearsal; end the command with every error of the run at once."""
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.check import check
    from megalaunch.plan.report import uncomposed_text
    from megalaunch.plan.resolve import resolve
    from megalaunch.platform.detect import detect_machine

    try:
        composition = compose(overrides)
    except ConfigError as error:
        refuse(uncomposed_text(error.problems))
    machine = detect_machine()
    run = resolve(composition.spec, machine, composition.choices.get("recipe")).spec
    elsewhere = run_elsewhere(composition, run, machine)
    if elsewhere is not None:
        typer.echo(f"the run needs {needed_devices(elsewhere)}; this machine has {present_devices(machine)}")
        run = elsewhere
    _refuse_errors(check(run, composition.origins, "train"))
    shrunk = shrink(run)
    _refuse_errors(check(shrunk.spec, None, "train", machine))
    return PreparedRehearsal(run, shrunk, machine)


def _refuse_errors(findings: list[Finding]) -> None:
    from megalaunch.plan.report import findings_text

    errors = [finding for finding in findings if finding.severity == "error" and finding.rule not in _NOT_NEEDED_HERE]
    if errors:
        refuse(findings_text(errors))


def print_differences(prepared: PreparedRehearsal) -> None:
    """Print what a rehearsal would play and how it differs from the run."""
    from megalaunch.runs.rehearsal.report import difference_lines, reduced_lines

    typer.echo("\n".join([*difference_lines(prepared.shrunk), *reduced_lines(prepared.shrunk.changes)]))


def rehearse(prepared: PreparedRehearsal, run_dir: Path | None, overrides: list[str], stop: StopSignals) -> ExitCode:
    """Play every phase of a prepared rehearsal and print what each proved; return the exit code.

    Args:
        run_dir: the directory to create and keep; None: a temporary one, removed when all phases pass.
        overrides: as typed, for the message of a failure.
        stop: the stop signals of this process.
    """
    from megalaunch.runs.rehearsal.phases import PhaseFailed, Rehearsal, describe_layout, steps_of
    from megalaunch.runs.rehearsal.report import comparison_lines, reduced_lines
    from megalaunch.runs.rehearsal.workers import ForkedWorkers

    root = _create(run_dir)
    spec = prepared.shrunk.spec
    typer.echo(
        f"rehearsing {spec.run.name} with small sizes on {spec.cluster.devices_per_node} CPU workers "
        f"({describe_layout(spec)}) in {root}"
    )
    for line in reduced_lines(prepared.shrunk.changes):
        typer.echo(line)
    keep = run_dir is not None
    try:
        rehearsal = Rehearsal(spec, root, ForkedWorkers(prepared.machine.cores, stop))
        rehearsal.play()
        steps = steps_of(RunDirectory(root / "train"))
        seconds = statistics.median(step["step_seconds"] for step in steps[1:])  # the first one warms up
        memory = steps[-1]["memory_bytes"]
        typer.echo("\n".join(["", *comparison_lines(prepared.run, rehearsal.spec, seconds, memory), ""]))
        typer.echo(f"all {len(rehearsal.passed)} phases passed" + (f"; the runs are in {root}" if keep else ""))
        return ExitCode.DONE
    except PhaseFailed as failure:
        stopped = failure.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
        keep = keep or not stopped
        _report(failure, root, overrides, stopped)
        return failure.exit_code
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


def _create(run_dir: Path | None) -> Path:
    """Create the directory of a rehearsal; end the command if it has files."""
    if run_dir is None:
        return Path(tempfile.mkdtemp(prefix="megalaunch-rehearsal-"))
    root = run_dir.expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            fail(f"{run_dir} is not empty\nfix:  name a new directory with --run-dir, or leave the option out")
    except OSError as error:
        fail(f"{run_dir} cannot be created ({error.strerror})\nfix:  name another directory with --run-dir")
    return root


def _report(failure: PhaseFailed, root: Path, overrides: list[str], stopped: bool) -> None:
    if stopped:
        typer.echo(f"stopped in the phase {failure.phase}", err=True)
        return
    lines = [
        f"phase {failure.phase} failed (exit code {int(failure.exit_code)})",
        *failure.report,
        f"logs: {root / failure.phase}",
        f"next: correct it, then megalaunch train {shlex.join([*overrides, '--rehearse'])}",
    ]
    typer.echo("\n".join(lines), err=True)
