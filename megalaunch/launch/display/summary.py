"""Summarise a launch: final losses, tokens, speed, paths of checkpoint and plots, and a sample of the model's text."""

from __future__ import annotations

from statistics import fmean

from megalaunch.format.numbers import format_count, format_counted, format_duration, format_loss
from megalaunch.format.paths import display_path
from megalaunch.launch.directory import DirectoryState
from megalaunch.launch.run_state import number
from megalaunch.rundir.checkpoint.listing import newest_step
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.metrics import is_task_evaluation, is_validation, task_scores, validation_losses
from megalaunch.rundir.outcome import ExitCode, Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec

_LAST_STEPS = 20
_SAMPLE_LINES = 12


def run_summary(spec: RunSpec, directory: RunDirectory, outcome: Outcome) -> list[str]:
    """Return the lines for a run that ended on purpose; figures are read from the run directory."""
    done = outcome.exit_code == ExitCode.DONE
    lines = [f"{spec.run.name}: {outcome.reason}" if done else f"{spec.run.name}: stopped at step {outcome.step}"]
    lines += _metrics_lines(directory, expects_validation=done and spec.train.validation_interval > 0)
    plots = (("plot", directory.plots / "loss.png"), ("experts", directory.plots / "experts.png"))
    for name, path in (("checkpoint", directory.checkpoint(newest_step(directory.checkpoints))), *plots):
        if path.exists():
            lines.append(_line(name, display_path(path)))
    return lines + _sample_lines(directory)


def _metrics_lines(directory: RunDirectory, expects_validation: bool) -> list[str]:
    """Return the lines of losses, scores and tokens; `expects_validation`: say why there is no validation loss."""
    records = list(read_lines(directory.metrics))
    steps = [record for record in records if "loss" in record]
    validations = [record for record in records if is_validation(record)]
    evaluations = [record for record in records if is_task_evaluation(record)]
    lines = []
    if steps:
        last = steps[-_LAST_STEPS:]
        mean = fmean(number(record, "loss") for record in last)
        over = format_counted(len(last), "step")
        lines.append(_line("training loss", f"{format_loss(mean)} (mean of the last {over})"))
    if validations:
        at = validations[-1]["step"]
        for name, loss in validation_losses(validations[-1]).items():
            of = f", {name}" if name else ""
            lines.append(_line("validation loss", f"{format_loss(loss)} (step {at}{of})"))
    elif expects_validation:  # the last step is always validated, where there is something to validate on
        lines.append(_line("validation loss", "none: the run has no validation data"))
    if evaluations:
        at = evaluations[-1]["step"]
        lines += [_line(name, f"{value:.4f} (step {at})") for name, value in task_scores(evaluations[-1]).items()]
    if steps:
        tokens = number(steps[-1], "tokens")
        seconds = sum(number(record, "step_seconds") for record in steps)
        rate = f", {format_count(tokens / seconds)} tokens/s on average" if seconds > 0 else ""
        lines.append(_line("tokens", f"{format_count(tokens)} seen in {format_duration(seconds)} of steps{rate}"))
    return lines


def _sample_lines(directory: RunDirectory) -> list[str]:
    try:
        text = directory.sample.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # A model may generate control characters, which a terminal would execute.
    lines = [
        "".join(c if c.isprintable() or c == "\t" else "\N{MIDDLE DOT}" for c in line)
        for line in text.rstrip().splitlines()
    ]
    more = ["    | ..."] if len(lines) > _SAMPLE_LINES else []
    return ["  the model wrote", *(f"    | {line}" for line in lines[:_SAMPLE_LINES]), *more]


def finished_report(spec: RunSpec, directory: RunDirectory, state: DirectoryState) -> list[str]:
    """Return the lines that are printed instead of restarting a finished run."""
    assert state.outcome is not None
    early = state.outcome.details.get("early_stopped")
    raised = "train.early_stopping.patience" if early else "train.steps"
    return [
        *run_summary(spec, directory, state.outcome),
        f"This run is finished. Raise {raised} to continue it, or set another run.directory for a new run.",
    ]


def _line(name: str, value: str) -> str:
    return f"  {name:<16} {value}"
