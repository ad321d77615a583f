"""The failure report, the last lines of a failed launch (at most 15): first failure, reason, log, next action."""

from __future__ import annotations

import socket
import textwrap
from pathlib import Path

from megalaunch.format.paths import display_path
from megalaunch.launch.agent import last_lines
from megalaunch.launch.hang.rank_monitor import STARTING, STEPPING
from megalaunch.launch.supervise import LaunchResult
from megalaunch.rundir.outcome import EXIT_MEANINGS, FAILED_NODES, ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.worker_failure import BROKEN_TORCH, Failure
from megalaunch.schema import RunSpec

MAX_LINES = 15
_WIDTH = 116


def failure_report(spec: RunSpec, directory: RunDirectory, end: LaunchResult, advice: str | None = None) -> list[str]:
    """Return the lines of the report; none for a run that is done.

    Args:
        advice: the next action, where it is not that of a training run.
    """
    outcome, failure = end.outcome, end.failure
    if outcome.exit_code == ExitCode.DONE:
        return []
    code = ExitCode(outcome.exit_code) if outcome.exit_code in list(ExitCode) else ExitCode.CRASH
    lines = [f"megalaunch: {_title(code, spec, end)} (exit code {outcome.exit_code})"]
    if failure is None:
        lines += _field("reason", outcome.reason, 4)
        if code not in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            lines += _details(outcome.details)
    else:
        lines += _failure_lines(failure, directory)
    if code not in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
        lines += _field("log", display_path(_log_path(directory, outcome.details.get("rank"))), 1)
    lines += _field("run", f"{display_path(directory.root)}, at step {outcome.step}", 1)
    lines += _field("next", advice or _next_step(code, end), 2)
    return lines[: MAX_LINES - 1] + lines[-1:] if len(lines) > MAX_LINES else lines


def _title(code: ExitCode, spec: RunSpec, end: LaunchResult) -> str:
    title = EXIT_MEANINGS[code].title
    if _has_broken_torch(end):
        return BROKEN_TORCH
    if FAILED_NODES in end.outcome.details:
        return "the preflight failed"
    if _has_zero_gradients(end):
        return "the gradient is zero: no parameter is updated"
    if code == ExitCode.NON_FINITE and "differing_ranks" in end.outcome.details:
        return "replicas of the weights differ"
    if code == ExitCode.NON_FINITE and "spike" in end.outcome.details:
        return "the loss is far above the earlier ones"
    if code != ExitCode.CRASH or end.failure is None:
        return title
    allowed, used = spec.launcher.max_restarts, int(end.outcome.details.get("restarts_in_a_row", 0))
    title = "the elastic agent failed" if end.failure.rank is None else title
    return (
        f"{title}; restarts used: {used} of {allowed} (launcher.max_restarts)" if allowed and used >= allowed else title
    )


def _has_zero_gradients(end: LaunchResult) -> bool:
    return end.outcome.exit_code == ExitCode.NON_FINITE and "zero_gradient_steps" in end.outcome.details


def _has_broken_torch(end: LaunchResult) -> bool:
    return end.failure is not None and end.failure.exception == BROKEN_TORCH


def _next_step(code: ExitCode, end: LaunchResult) -> str:
    step, failure = EXIT_MEANINGS[code].action, end.failure
    if _has_broken_torch(end):
        return "repair or leave out that package, then launch again"
    if FAILED_NODES in end.outcome.details:
        return "repair what is named above, then launch again; launcher.preflight=false leaves the checks out"
    if _has_zero_gradients(end):
        return (
            "start a new run with a lower optimizer.lr or a higher schedule.warmup_steps; train.max_zero_grad_steps=0 "
            "only warns"
        )
    if code == ExitCode.NON_FINITE and "differing_ranks" in end.outcome.details:
        return "run the same command to resume; have the devices and the memory of the ranks named above tested"
    if code == ExitCode.NON_FINITE and "spike" in end.outcome.details:
        return "inspect the samples of the step; train.bad_step_action=skip or rewind leaves them out"
    if code != ExitCode.HANG or failure is None:
        return step
    limit = "start_timeout" if failure.phase in STARTING else "hang_timeout"
    limit = "step_timeout" if failure.phase == STEPPING else limit
    return f"read the log; run the same command to resume; if it was only slow, raise launcher.{limit}"


def _failure_lines(failure: Failure, directory: RunDirectory) -> list[str]:
    lines = _field("first", f"{failure.source} on {socket.gethostname()}", 1)
    lines += _field("where", f"step {failure.step}, {failure.phase or 'starting'} (attempt {failure.attempt + 1})", 1)
    lines += _field("reason", failure.error, 4)
    if failure.rank is None and failure.exception != BROKEN_TORCH:  # whose reason says all
        lines += [f"  | {line[: _WIDTH - 4]}" for line in last_lines(directory.agent_log, 6)]
    return lines


def _details(details: dict[str, object]) -> list[str]:
    """Return the details of an outcome that fit in a line; longer evidence is in outcome.json."""
    lines: list[str] = []
    for key, value in details.items():
        if isinstance(value, (str, int, float)) and len(lines) < 6:
            lines += _field(key.replace("_", " "), str(value), 2)
    return lines


def _log_path(directory: RunDirectory, rank: object) -> Path:
    if isinstance(rank, int):
        return directory.rank_log(rank)
    return directory.agent_log if directory.agent_log.exists() else directory.logs


def _field(name: str, text: str, max_lines: int) -> list[str]:
    width = _WIDTH - 10
    wrapped = textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False) or [""]
    if len(wrapped) > max_lines:
        wrapped = [*wrapped[: max_lines - 1], textwrap.shorten(" ".join(wrapped[max_lines - 1 :]), width)]
    return [f"  {name if index == 0 else '':<7} {line}" for index, line in enumerate(wrapped)]
