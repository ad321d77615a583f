"""Run the trials of a sweep one after the other, by the launch code of `train`, and rank them."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from megalaunch.config.errors import ConfigError
from megalaunch.format.paths import display_path
from megalaunch.fs import write_file_atomically
from megalaunch.installation import install_command
from megalaunch.launch.directory import RunDirectoryError, create_folders, decide, inspect_run, lock_run, unlock_run
from megalaunch.launch.local import Launch, run_locally
from megalaunch.launch.lock import RunLock, RunLocked
from megalaunch.launch.run_state import throughput_basis
from megalaunch.launch.stop import StopBeforeLaunch, StopSignals
from megalaunch.plan.report import finding_line, problems_text
from megalaunch.plan.resolve import resolve
from megalaunch.plan.resume_compatibility import incompatible_changes
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.runs.errors import fail, refuse
from megalaunch.runs.hub_names import pin_hub_names
from megalaunch.runs.prepare_run import PreparedRun, prepare_data
from megalaunch.runs.sweep.display import SweepDisplay, open_sweep_display
from megalaunch.runs.sweep.folder import SweepFolderError, open_folder, record_started, started_trials
from megalaunch.runs.sweep.plan import PlannedSweep, ValidatedPoint
from megalaunch.runs.sweep.plugin_trials import names_plugin, run_by_plugin
from megalaunch.runs.sweep.report import counts, results_json, results_text
from megalaunch.runs.sweep.results import TrialResult, draw_results, is_due, rank_results, read_result, write_results
from megalaunch.runs.sweep.task_set import run_trials_elsewhere
from megalaunch.runs.task_set import record_end

if TYPE_CHECKING:
    from megalaunch.runs.sweep.sampling import TreeSampler

_PROPOSALS_PER_TRIAL = 20


def run_sweep(planned: PlannedSweep, as_json: bool) -> ExitCode:
    """Run the trials that have not run, write and print the results; return the exit code of the sweep."""
    request, folder = planned.request, planned.request.folder
    if not planned.runnable and request.sampler != "tpe":
        refuse("\n".join([*_all_reasons(planned), *counts(planned)]))
    output = sys.stderr if as_json else sys.stdout
    with StopSignals() as stop, contextlib.redirect_stdout(output):
        try:
            lock = _lock_sweep(planned)
            try:
                if names_plugin(request.overrides.typed):
                    code = _run_by_plugin(planned, stop)
                else:
                    code = _TrialRunner(planned, stop, not as_json and output.isatty()).run()
            finally:
                lock.release()
        except StopBeforeLaunch as stopped:
            code = stopped.exit_code
    results = _results(planned)
    files = _write(planned, results)
    typer.echo(results_json(planned, results, files) if as_json else results_text(planned, results, files))
    if code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
        reason = "stopped; run the same command to continue the sweep"
        record_end(folder.root, code, reason)
        typer.echo(reason, err=True)
        return code
    if ranked := rank_results(results, request.metric):
        record_end(folder.root, ExitCode.DONE, f"{len(ranked)} of {len(results)} trials ranked by {request.metric}")
        return ExitCode.DONE
    reason = f"no trial could be ranked; see the logs in the run directories below {display_path(folder.root)}"
    typer.echo(f"error: {reason}", err=True)
    failed = next((r.exit_code for r in results if r.exit_code in list(ExitCode) and r.exit_code), ExitCode.CRASH)
    record_end(folder.root, failed, reason)
    return ExitCode(failed)


def run_elsewhere(planned: PlannedSweep, detach: bool) -> None:
    """Run the trials by the launcher of the sweep; returns when only the ranking is due here."""
    _refuse_tpe(planned, "a launcher")
    if not planned.runnable:
        refuse("\n".join([*_all_reasons(planned), *counts(planned)]))
    _lock_sweep(planned).release()  # the final job locks it again, on another machine
    typer.echo("\n".join(counts(planned)))
    run_trials_elsewhere(planned, detach, lambda text: typer.echo(f"note: {text}", err=True))


def run_trial(planned: PlannedSweep, number: int) -> ExitCode:
    """Run one trial of a sweep that another process holds; DONE when it has an outcome, a failure included."""
    point = next((point for point in planned.runnable if point.number == number), None)
    if point is None:
        fail(f"--trial {number}: no valid point of the sweep has this number\nfix:  --dry-run shows all")
    with StopSignals() as stop:
        try:
            _TrialRunner(planned, stop, terminal=False).run_one(point)
        except StopBeforeLaunch as stopped:
            return stopped.exit_code
        return stop.exit_code if stop.count else ExitCode.DONE


def _run_by_plugin(planned: PlannedSweep, stop: StopSignals) -> ExitCode:
    """Run all trials by a launcher plug-in of Hydra, which needs to know them before the first one starts."""
    _refuse_tpe(planned, "a launcher plug-in")
    typer.echo("\n".join(counts(planned)))
    stop.watching = False
    try:
        run_by_plugin(planned)
    except ConfigError as error:
        refuse(problems_text(error.problems))
    return stop.exit_code if stop.count else ExitCode.DONE


def _refuse_tpe(planned: PlannedSweep, who: str) -> None:
    if planned.request.sampler == "tpe":
        fail(f"--sampler tpe learns from each trial, and {who} gets all at once\nfix:  --sampler random")


def _all_reasons(planned: PlannedSweep) -> list[str]:
    if planned.shared:
        return []  # `counts` shows them once
    shown = planned.skipped[:10]
    return [f"  {point.label}: {finding_line(point.reasons[0])}" for point in shown]


def _lock_sweep(planned: PlannedSweep) -> RunLock:
    """Lock the sweep's folder, which must be new or belong to the same sweep."""
    folder = planned.request.folder
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder.lock)
    except RunLocked as error:
        fail(f"{error}\nfix:  wait for it or stop it there, or choose another name with --name")
    except OSError as error:
        cause = f"{display_path(folder.root)} cannot be written ({error.strerror})"
        fail(f"{cause}\nfix:  run the command in another folder")
    try:
        if open_folder(folder, planned.request.definition):
            typer.echo(f"continuing the sweep in {display_path(folder.root)}")
    except SweepFolderError as error:
        lock.release()
        fail(f"{error}\nfix:  {error.fix}")
    return lock


class _TrialRunner:
    """Runs the trials of one sweep in order, until all have run or a stop is requested."""

    def __init__(self, planned: PlannedSweep, stop: StopSignals, terminal: bool) -> None:
        self._planned, self._stop = planned, stop
        self._display: SweepDisplay = open_sweep_display(planned.request.metric, terminal, sys.stdout)

    def run(self) -> ExitCode:
        """Run the trials; DONE when every trial has run, failed ones included."""
        typer.echo("\n".join(counts(self._planned)))
        try:
            for point in self._points():
                self._stop.watching = False
                if self._stop.count:
                    return self._stop.exit_code
                if is_due(self._planned, point):
                    self._display.begin(_results(self._planned), self._result(point))
                    self._trial(point)
                    self._display.end(self._result(point))
                    self._save()
            return self._stop.exit_code if self._stop.count else ExitCode.DONE
        finally:
            self._stop.watching = False
            self._display.finish()

    def run_one(self, point: ValidatedPoint) -> None:
        """Run one trial, whatever became of it before."""
        self._display.begin([self._result(point)], self._result(point))
        try:
            self._trial(point)
            self._display.end(self._result(point))
        finally:
            self._display.finish()

    def _points(self) -> Iterator[ValidatedPoint]:
        """Yield valid points; for tpe first the trials that have started, then proposals that learn from the scores."""
        request = self._planned.request
        if request.sampler != "tpe":
            yield from self._planned.runnable
            return
        sampler = _tree_sampler(self._planned)
        for number, values in started_trials(request.folder).items():
            point = self._planned.validator.validate(number, values)
            self._planned.points.append(point)
            if point.is_valid:
                yield point
            sampler.learn(values, self._result(point).score(request.metric))
        wanted = request.trials or 0
        number = max((point.number for point in self._planned.points), default=0)
        for _ in range(_PROPOSALS_PER_TRIAL * wanted):
            if len(self._planned.runnable) >= wanted:
                return
            number += 1
            values = sampler.propose()
            point = self._planned.validator.validate(number, values)
            if point.is_valid or point.reasons[0].rule != "sweep.repeated":
                self._planned.points.append(point)
            if point.is_valid:
                yield point
                sampler.learn(values, self._result(point).score(request.metric))
            else:
                sampler.learn(values, None)

    def _result(self, point: ValidatedPoint) -> TrialResult:
        return read_result(point.number, point.values, self._planned.request.folder.trial(point.number))

    def _save(self) -> None:
        planned = self._planned
        write_results(planned.request.folder, _results(planned), planned.skipped, planned.request.metric)

    def _trial(self, point: ValidatedPoint) -> None:
        """Launch one trial; an error that prevents its start becomes its outcome."""
        folder = self._planned.request.folder
        directory = folder.trial(point.number)
        record_started(folder, point.number, point.values)
        try:
            lock = lock_run(directory)
        except (RunDirectoryError, RunLocked) as error:
            self._display.say(f"  error: {error}")
            return
        try:
            planned = self._prepare(point)
            launch = Launch(
                planned.spec,
                directory,
                lock,
                planned.composition.overrides,
                throughput_basis(planned.spec),
                planned.machine.cores,
            )
            run_locally(launch, self._stop, lambda view: self._display)
        except _TrialNotStarted as refusal:
            create_folders(directory)
            write_outcome(directory.outcome, Outcome(refusal.code, str(refusal), 0))
        except RunDirectoryError as error:
            self._display.say(f"  error: {error}")
        finally:
            unlock_run(directory, lock)

    def _prepare(self, point: ValidatedPoint) -> PreparedRun:
        """Return the trial with its frozen spec and prepared data; raises _TrialNotStarted with the reason."""
        assert point.spec is not None, "only valid points run"
        assert point.composition is not None, "only valid points run"
        directory, machine = self._planned.request.folder.trial(point.number), self._planned.machine
        state, spec = inspect_run(directory), point.spec
        if state.stored is not None:
            choices = point.composition.choices
            spec = resolve(point.composition.spec, machine, choices.get("recipe"), state.stored).spec
            spec = pin_hub_names(spec, choices.get("model", ""), state.stored)
            if changes := incompatible_changes(spec, state.stored):
                raise _TrialNotStarted(ExitCode.CONFIGURATION, f"its recipe changed: {changes[0].message}")
        planned = PreparedRun(point.composition, spec, machine, directory, state, decide(state, spec))
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                return replace(planned, spec=prepare_data(planned, self._display.say))
        except typer.Exit as end:
            reason = (errors.getvalue().strip().splitlines() or ["its data cannot be used"])[0]
            raise _TrialNotStarted(end.exit_code, reason.removeprefix("error: ")) from end


class _TrialNotStarted(Exception):
    """A trial cannot start; `code` is its exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def _tree_sampler(planned: PlannedSweep) -> TreeSampler:
    request = planned.request
    try:
        from megalaunch.runs.sweep.sampling import TreeSampler

        return TreeSampler(request.overrides.axes, request.metric, request.seed)
    except ImportError:
        fail(f"--sampler tpe needs optuna\nfix:  {install_command('megalaunch[sweep]')}, or --sampler random")


def _results(planned: PlannedSweep) -> list[TrialResult]:
    folder = planned.request.folder
    return [read_result(point.number, point.values, folder.trial(point.number)) for point in planned.runnable]


def _write(planned: PlannedSweep, results: list[TrialResult]) -> dict[str, str]:
    """Write results.csv, results.png and best.yaml; return the paths of the files written."""
    from megalaunch.config.write_recipe import recipe_text

    request, folder = planned.request, planned.request.folder
    files: dict[str, str] = {}
    if not results:
        return files
    write_results(folder, results, planned.skipped, request.metric)
    files["results"] = str(folder.results)
    order = rank_results(results, request.metric)
    if not order:
        return files
    try:
        if draw_results(folder, results, request.metric):
            files["plot"] = str(folder.plot)
    except ImportError:
        install = install_command("megalaunch[train]")
        typer.echo(f"note: no plot: matplotlib is not installed ({install})", err=True)
    best = next(point for point in planned.runnable if point.number == order[0].number)
    assert best.composition is not None, "only valid points run"
    summary = f"The best of {len(order)} trials of the sweep {request.name}: {best.label}"
    recipe = recipe_text(best.composition, f"{request.name}_best", summary)
    write_file_atomically(folder.best, recipe.text)
    for name, text in recipe.option_files.items():
        (folder.root / name).parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(folder.root / name, text)
    files["best"] = str(folder.best)
    files["run it"] = f"megalaunch train recipe={folder.best}"
    return files
