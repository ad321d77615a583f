"""Submit a checked run as a job of its launcher, and show it until it ends."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megalaunch.format.paths import display_path
from megalaunch.fs import make_directory
from megalaunch.launch.background import continue_in_background
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.launchers.record import read_record
from megalaunch.launchers.select_launcher import select_launcher
from megalaunch.plan.fewer_nodes import smaller_node_counts
from megalaunch.plan.findings import as_override
from megalaunch.plan.rules.registry import RuleContext
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.kubernetes import device_resource
from megalaunch.rundir.outcome import ExitCode
from megalaunch.runs.errors import fail
from megalaunch.runs.follow_job import JobView, follow_job, print_end
from megalaunch.schema.spec_file import write_spec

if TYPE_CHECKING:
    from megalaunch.launch.stop import StopSignals
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.prepare_run import PreparedRun
    from megalaunch.schema import RunSpec

_PINNED = ("platform.chip", "cluster.nodes", "cluster.devices_per_node")
"""Keys whose open values follow from the machine: the job gets those that were checked here."""


def training_job(planned: PreparedRun) -> Job:
    """Return the job of a run: the same command, which in the allocation starts one launcher on each node."""
    spec, composition = planned.spec, planned.composition
    chip = CHIPS.get(spec.platform.chip)
    on_cpu = chip is not None and chip.device == "cpu"
    values = {
        "platform.chip": spec.platform.chip,
        "cluster.nodes": spec.cluster.nodes,
        "cluster.devices_per_node": spec.cluster.devices_per_node,
    }
    pinned = [f"{key}={values[key]}" for key in _PINNED if composition.origins[key].open]
    arguments = ("train", *composition.overrides, *pinned)
    return Job(
        str(spec.run.name),
        int(spec.cluster.nodes),
        0 if on_cpu else int(spec.cluster.devices_per_node),
        arguments,
        planned.directory.root.absolute(),
        Path.cwd(),
        spec.launcher,
        device_resource(chip) if chip is not None else "",
        _on_fewer_nodes(spec, arguments),
    )


def _on_fewer_nodes(spec: RunSpec, arguments: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return the command for each number of nodes on which a checked run may continue (`launcher.min_nodes`)."""
    if spec.launcher.min_nodes is None:
        return {}
    counts = smaller_node_counts(RuleContext(spec, "train"), spec.launcher.min_nodes)
    return {count.nodes: _with_overrides(arguments, count.values) for count in counts if not count.problem}


def _with_overrides(arguments: Sequence[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return arguments in which these values take the places of those that were given for the same keys."""
    kept = (word for word in arguments if word.lstrip("+~").partition("=")[0] not in values)
    return (*kept, *(f"{key}={as_override(value)}" for key, value in values.items()))


def print_manifest(planned: PreparedRun) -> None:
    """Print what would be submitted."""
    try:
        launcher = select_launcher(planned.spec.launcher.name)
        typer.echo(f"\n{launcher.manifest(training_job(planned))}", nl=False)
    except LauncherError as error:
        fail(error.text())


def submit_run(planned: PreparedRun, detach: bool, stop: StopSignals) -> ExitCode:
    """Submit the run, and show it until it ends; return its exit code.

    Args:
        detach: return when the job is submitted; a job that ends with its process continues in the background.
    """
    directory = planned.directory
    _refuse_second_job(directory)
    view = JobView(planned.spec, directory)
    try:
        launcher = select_launcher(planned.spec.launcher.name)
        background = continue_in_background() if detach and launcher.attached else None
        if planned.decision.action == "start":
            make_directory(directory.root)
            write_spec(planned.spec, directory.spec)  # for `watch`; node 0 adds the paths of the prepared data
        record = launcher.submit(training_job(planned))
    except LauncherError as error:
        fail(error.text())
    except OSError as error:
        fail(f"{display_path(directory.root)} cannot be written ({error.strerror})\nfix:  name another run.directory")
    spare = planned.spec.launcher.slurm.spare_nodes if record.launcher == "slurm" else 0
    nodes = f"{record.nodes} node{'s' if record.nodes > 1 else ''}" + (f" and {spare} spare" if spare else "")
    typer.echo(f"submitted job {record.id} to {record.launcher}: {nodes}, output in {display_path(record.output)}")
    if detach:
        typer.echo(f"next: megalaunch watch {shlex.quote(display_path(directory.root))}, status, logs or stop")
        if background is None:
            return ExitCode.DONE
        background.leave_terminal(directory.command_log)
    status = follow_job(view, launcher, record, stop)
    return print_end(view, launcher, record, status)


def _refuse_second_job(directory: RunDirectory) -> None:
    """End the command if the run has a job that has not ended, or a launcher holds its directory."""
    from megalaunch.launch.directory import run_is_locked

    record = read_record(directory.job)
    if record is not None:
        try:
            status = select_launcher(record.launcher).status(record)
        except LauncherError as error:
            fail(f"{display_path(directory.root)} has job {record.id}, whose state is unknown: {error.text()}")
        if status.phase in ("pending", "running"):
            shown = shlex.quote(display_path(directory.root))
            fail(
                f"{display_path(directory.root)} has job {record.id} already: {status}\n"
                f"fix:  megalaunch watch {shown} shows it, megalaunch stop {shown} ends it"
            )
    if run_is_locked(directory):
        fail(f"{display_path(directory.root)} is in use by another launcher\nfix:  wait for it or stop it there")
