"""Prepare a run from command-line overrides: compose, check, compare to its directory, prepare its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from megalaunch.rundir.outcome import ExitCode

if TYPE_CHECKING:
    from megalaunch.config.compose import Composition
    from megalaunch.data.prepare import PreparedData
    from megalaunch.launch.directory import Decision, DirectoryState, RunDirectoryError
    from megalaunch.plan.findings import Finding
    from megalaunch.platform.allocation import NodePlace
    from megalaunch.platform.detect import Machine
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.several_nodes import Start
    from megalaunch.schema import RunSpec


@dataclass(frozen=True)
class PreparedRun:
    """A run that may start: resolved, checked, and compatible with the run in its directory."""

    composition: Composition
    spec: RunSpec
    machine: Machine
    directory: RunDirectory
    state: DirectoryState
    decision: Decision
    derived: tuple[Finding, ...] = ()
    start: Start = "here"

    @property
    def place(self) -> NodePlace | None:
        """The place of this node, if the run starts on it as on every other node."""
        allocation = self.machine.allocation
        return allocation.place if self.start == "node" and allocation is not None else None


def prepare_run(overrides: list[str], starts: bool) -> PreparedRun:
    """Compose, resolve and check a run, and print it; end the command with every problem at once.

    Args:
        starts: the run starts on this machine now, so it must match the spec.
    """
    from megalaunch.hub.name import HubError
    from megalaunch.launch.directory import RunDirectoryError, decide, inspect_run
    from megalaunch.plan.resolve import resolve
    from megalaunch.platform.detect import detect_machine
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.branch import pin_branch
    from megalaunch.runs.errors import fail
    from megalaunch.runs.hub_names import pin_hub_names, pin_model_option
    from megalaunch.runs.required_packages import require_training_packages
    from megalaunch.runs.several_nodes import start_of
    from megalaunch.schema import SpecError

    composition = _compose(overrides)
    machine = detect_machine()
    recipe = composition.choices.get("recipe")
    resolution = resolve(composition.spec, machine, recipe)
    directory = RunDirectory(Path(str(resolution.spec.run.directory)))
    try:
        state = inspect_run(directory)
    except RunDirectoryError as error:
        refuse_directory(error)
    except SpecError as error:
        fail(f"{error}\nfix:  name another run.directory")
    model = composition.choices.get("model", "")
    if state.stored is not None:
        composition = _compose(pin_model_option(overrides, model, state.stored) or overrides)
        resolution = resolve(composition.spec, machine, recipe, state.stored)
    try:
        spec = pin_hub_names(resolution.spec, composition.choices.get("model", ""), state.stored)
    except HubError as error:
        fail(str(error))
    spec = pin_branch(spec, state.stored)
    try:
        start = start_of(spec, machine.allocation) if starts else "hand"
        planned = PreparedRun(
            composition, spec, machine, directory, state, decide(state, spec), resolution.notes, start
        )
    except RunDirectoryError as error:
        refuse_directory(error)
    if starts and start != "job":
        require_training_packages()
    _check(planned, starts)
    return planned


def _compose(overrides: list[str]) -> Composition:
    """Compose the overrides; end the command with every problem of them."""
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.report import uncomposed_text
    from megalaunch.runs.errors import refuse

    try:
        return compose(overrides)
    except ConfigError as error:
        refuse(uncomposed_text(error.problems))


def _check(planned: PreparedRun, starts: bool) -> None:
    """End the command with all errors; else print warnings and the table of the run."""
    from megalaunch.plan.check import check
    from megalaunch.plan.findings import has_errors, sort_findings
    from megalaunch.plan.overrides import changed_overrides
    from megalaunch.plan.report import findings_text, problems_as_findings, run_table
    from megalaunch.plan.resolve import machine_mismatch
    from megalaunch.plan.resume_compatibility import compatible_changes, incompatible_changes
    from megalaunch.plan.topology import Topology
    from megalaunch.runs.branch import check_branch
    from megalaunch.runs.corpus_check import check_corpus
    from megalaunch.runs.errors import refuse
    from megalaunch.runs.missing_devices import MISSING, refusal_text
    from megalaunch.runs.several_nodes import MULTI_NODE, check_nodes

    spec, stored = planned.spec, planned.state.stored
    doubts = [finding for finding in planned.derived if finding.severity != "note"]  # an emulated dtype
    overrides, on_this_machine = planned.composition.overrides, starts and planned.start not in ("srun", "job", "pod")
    machine = planned.machine if on_this_machine else None
    findings = [*check(spec, planned.composition.origins, "train", machine), *doubts]
    if planned.decision.action != "report":
        findings += check_corpus(spec, planned.composition.origins)
    findings += problems_as_findings(planned.composition.repeated, "warning")
    findings += check_branch(spec, begun=bool(planned.state.checkpoints))
    if on_this_machine:
        automatic = planned.composition.spec.platform.chip == "auto"
        findings += machine_mismatch(spec, planned.machine, automatic)
    if starts:
        findings = check_nodes(findings, planned.start, spec, planned.machine.allocation, overrides)
    else:  # the user may start it on other machines
        findings = [_downgrade_to_note(finding) if finding.rule == MULTI_NODE else finding for finding in findings]
    if stored is not None:
        if spec.model.vocab_size == stored.model.vocab_size:  # the trained tokenizer may be smaller than asked
            findings = [finding for finding in findings if finding.rule != "model.vocab_covers_tokenizer"]
        if planned.state.checkpoints:  # the checkpoint has the weights, so their source may be gone
            findings = [finding for finding in findings if finding.rule != "checkpoint.load_pretrained"]
        findings += [*incompatible_changes(spec, stored), *changed_overrides(spec, stored)]
    findings = sort_findings(findings)
    if has_errors(findings):
        here = planned.machine if planned.start != "job" else None
        text = refusal_text(findings, planned.composition, spec, here)
        rules = {finding.rule for finding in findings}
        several = MULTI_NODE in rules and MISSING not in rules and planned.machine.allocation is None
        about_data = {f.rule for f in findings if f.severity == "error"} == {"data.corpus_exists"}
        code = ExitCode.DATA if about_data else ExitCode.CONFIGURATION
        refuse("\n".join([text, *(command_lines(planned) if several else [])]), code)
    if planned.start in ("srun", "pod") or (planned.place is not None and planned.place.rank > 0):
        return  # node 0 prints it
    typer.echo(run_table(spec, Topology.from_spec(spec)))
    shown = [finding for finding in findings if finding.severity == "warning"]
    if shown:
        typer.echo(findings_text(shown))
    for problem in () if planned.state.checkpoints else planned.composition.notes:
        typer.echo(f"  {problem.message}")
    for note in compatible_changes(spec, stored) if stored is not None else []:
        typer.echo(f"  {note.message}")
    for line in planned.decision.notes:
        typer.echo(line)


def _downgrade_to_note(finding: Finding) -> Finding:
    return replace(finding, severity="note")


def command_lines(planned: PreparedRun) -> list[str]:
    """Return the commands that start each node's agent, as lines to paste."""
    from megalaunch.launch.commands import node_commands, shown_commands

    path = planned.directory.spec
    missing = [] if path.exists() else [f"# {path} does not exist yet: train --prepare-only writes it"]
    return ["", "command", *shown_commands(node_commands(planned.spec, path)), *missing]


def prepare_data(planned: PreparedRun, say: Callable[[str], None] = typer.echo) -> RunSpec:
    """Prepare the data and return the spec with its paths.

    Ends the command for data that cannot be used, or that differs from the data with which the run began.

    Args:
        say: prints a line of progress.
    """
    from megalaunch.data.errors import DataError
    from megalaunch.data.prepare import prepare
    from megalaunch.hub.name import HubError
    from megalaunch.launch.heartbeat import Heartbeat
    from megalaunch.plan.report import findings_text
    from megalaunch.plan.resume_compatibility import incompatible_changes
    from megalaunch.runs.epoch_check import check_epochs
    from megalaunch.runs.errors import fail, refuse
    from megalaunch.runs.hub_names import fetch_hub_files

    try:
        with Heartbeat(say) as heartbeat:
            local = fetch_hub_files(planned.spec, bool(planned.state.checkpoints), heartbeat.say)
            prepared = prepare(local.data, local.tokenizer, heartbeat.say)
    except HubError as error:
        fail(str(error), ExitCode.DATA)
    except DataError as error:
        fail(str(error), ExitCode.DATA)
    spec = _apply_prepared(planned, prepared)
    changes = incompatible_changes(spec, planned.state.stored) if planned.state.stored is not None else []
    if changes:
        refuse(findings_text(changes))
    validation = f", {prepared.validation_tokens:,} for validation" if prepared.validation_tokens else ""
    tokens = "mock tokens" if spec.data.mock else f"{prepared.train_tokens:,} tokens"
    vocabulary = spec.model.vocab_size if spec.data.mock else prepared.vocab_size
    say(f"data: {tokens}{validation}; vocabulary {vocabulary:,}")
    for finding in check_epochs(spec):
        say(f"{finding.severity}: {finding.message}")
    return spec


def _apply_prepared(planned: PreparedRun, prepared: PreparedData) -> RunSpec:
    """Set what was prepared in the spec; end the command if the vocabulary that was given is too small."""
    from megalaunch.runs.errors import fail
    from megalaunch.runs.prepared_data import apply_prepared

    origin = planned.composition.origins.get("model.vocab_size")
    given = origin is not None and origin.kind != "default" and not origin.open
    try:
        return apply_prepared(planned.spec, prepared, planned.spec.model.vocab_size if given else None)
    except ValueError as error:
        fail(str(error))


def refuse_directory(error: RunDirectoryError) -> NoReturn:
    """End the command because the directory cannot hold this run."""
    from megalaunch.runs.errors import fail

    fail(f"{error}\nfix:  {error.fix}")
