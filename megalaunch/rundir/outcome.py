"""The end of a launch: exit codes and `outcome.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from megalaunch.fs import reserve_space, write_file_atomically
from megalaunch.rundir.redact import redact_record

_RESERVED_BYTES = 4096


class ExitCode(IntEnum):
    """Exit codes of the launcher, also written to outcome.json."""

    DONE = 0
    CONFIGURATION = 2
    DATA = 3
    CHECKPOINT = 4
    CRASH = 5
    HANG = 6
    NON_FINITE = 7
    NO_PROGRESS = 8
    PREEMPTED = 75
    INTERRUPTED = 130


NOT_RESTARTED = tuple(code for code in ExitCode if code not in (ExitCode.CRASH, ExitCode.HANG))
"""Exit codes of a launcher after which the launchers of all nodes are not started again."""


@dataclass(frozen=True)
class ExitMeaning:
    """What an exit code means: in the failure report, and in docs/reference/exit-codes.md, which is made from it.

    Attributes:
        title: the first line of the failure report.
        cause: what leads to it, for the reference.
        action: the last line of the failure report: what to do next.
    """

    title: str
    cause: str
    action: str


EXIT_MEANINGS: Mapping[ExitCode, ExitMeaning] = {
    ExitCode.DONE: ExitMeaning("completed", "The command did what it was asked for.", "nothing"),
    ExitCode.CONFIGURATION: ExitMeaning(
        "the configuration is invalid",
        "A command line, recipe, key or layout is invalid, a package is missing, the run directory belongs to "
        "another run or is in use, or a node failed the preflight.",
        "change the settings named above, then launch again",
    ),
    ExitCode.DATA: ExitMeaning(
        "the data cannot be used",
        "Text, tokens or a tokenizer cannot be read, or do not fit the model.",
        "repair the data named above, then run the same command to resume",
    ),
    ExitCode.CHECKPOINT: ExitMeaning(
        "a checkpoint could not be saved or loaded, or the run directory is not writable",
        "The disk was full, read-only or gone for `run.storage_timeout`, or every checkpoint is damaged. The last "
        "valid checkpoint is kept.",
        "free disk space or repair the cause named above, then run the same command to resume",
    ),
    ExitCode.CRASH: ExitMeaning(
        "a worker crashed",
        "A worker or its agent raised an exception, was killed or was lost, and all restarts "
        "(`launcher.max_restarts`) are used.",
        "read the log; run the same command to resume from the newest checkpoint",
    ),
    ExitCode.HANG: ExitMeaning(
        "the workers hung",
        "No rank made progress for longer than the limit of its phase, and all restarts are used. The report names the "
        "rank that is behind.",
        "read the log; run the same command to resume; if it was only slow, raise the limit of its phase "
        "(launcher.start_timeout, step_timeout, hang_timeout)",
    ),
    ExitCode.NON_FINITE: ExitMeaning(
        "the loss or the gradient is not finite",
        "A loss or gradient is inf or nan, a loss is a spike, replicas of a weight differ, or the gradient was exactly "
        "0 for `train.max_zero_grad_steps` steps in a row. Values that are not finite never change the weights.",
        "inspect the samples named above; lower optimizer.lr or raise schedule.warmup_steps",
    ),
    ExitCode.NO_PROGRESS: ExitMeaning(
        "no progress: the same failure at the same step three times",
        "The last three failures had the same step and exception: a further restart would fail in the same way.",
        "the failure is reproducible: read the log, repair the cause, then launch again",
    ),
    ExitCode.PREEMPTED: ExitMeaning(
        "stopped by a signal; the run can be resumed",
        "SIGTERM, or another early warning of a scheduler: a checkpoint was saved, unless a second signal followed or "
        "the run directory could not be written. Also workers that find that later ones have taken over the run: they "
        "change nothing any more.",
        "run the same command to resume",
    ),
    ExitCode.INTERRUPTED: ExitMeaning(
        "interrupted; the run can be resumed",
        "Ctrl-C (SIGINT): a checkpoint was saved, unless a second one followed or the run directory could not be "
        "written.",
        "run the same command to resume",
    ),
}
"""Every exit code: the failure report and the reference take their words from here."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a launch. `step` is the last finished step; `details` is plain JSON for the report."""

    exit_code: int
    reason: str
    step: int
    details: dict[str, Any] = field(default_factory=dict)


STOPPED_BETWEEN_ATTEMPTS = (
    "stopped after a failure, before the next attempt; run the same command to resume from the newest checkpoint"
)
"""Reason of a launch that is stopped while no worker runs that could save."""
FAILED_NODES = "failed_nodes"
"""Key of `details`: the nodes that failed the preflight."""


def reserve_outcome_space(path: Path) -> None:
    """Reserve disk space for the outcome at the start, so that a run that fills the disk can still write it."""
    reserve_space(path, _RESERVED_BYTES)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write the outcome by an atomic rename, in the reserved file if there is one; no secret of the environment."""
    write_file_atomically(path, json.dumps(redact_record(asdict(outcome)), indent=2), leftover="reuse")


def read_outcome(path: Path, since: float = 0.0) -> Outcome | None:
    """Return the recorded outcome, or None if there is no readable one.

    Args:
        since: one that was written before, in seconds since 1970, is of another launch: None.
    """
    try:
        with path.open(encoding="utf-8") as file:
            is_older = os.fstat(file.fileno()).st_mtime < since
            return None if is_older else Outcome(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None
