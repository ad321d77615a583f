"""Find the cause of a failed attempt: the rank that failed first, not the ranks that only lost their peer."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megalaunch.launch.hang.collective_mismatch import Culprit
from megalaunch.launch.hang.rank_monitor import Rank
from megalaunch.launch.storage_monitor import StorageMonitor
from megalaunch.platform.cgroups import OomKills
from megalaunch.platform.torch_backends import broken_backend
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.worker_failure import BROKEN_TORCH, Failure, describe_exit, failure_from_event, is_lost_peer

SUPERSEDED = f"exit code {int(ExitCode.PREEMPTED)}"  # of a worker that found later workers of the run


def record_failure(storage: StorageMonitor, failure: Failure) -> None:
    """Write the `worker_failed` event of a failure that its worker could not write."""
    storage.record(
        "worker_failed",
        rank=failure.rank,
        coordinates=failure.coordinates,
        phase=failure.phase,
        step=failure.step,
        exception=failure.exception,
        message=failure.message,
        attempt=failure.attempt,
    )


def first_failure(
    attempt: int,
    events: Sequence[Record],
    ranks: Mapping[int, Rank],
    exit_codes: Mapping[int, int],
    step: int,
    culprit: Culprit | None = None,
    agent_code: int | None = None,
    aborted: Collection[int] = (),
) -> Failure:
    """Return the cause of a failed attempt.

    In this order: a worker's own exception; the agent, if a signal ended it, as its workers die with it; `culprit`, if
    all killed ranks are in `aborted`; a rank that outlived its peers (a hang); a worker that ended without an
    exception; a peer-loss error.

    Args:
        events: `worker_failed` records of the attempt, in the order of the file: clocks may differ or jump.
        ranks: its workers.
        exit_codes: of workers by pid, from the agent's log.
        culprit: the rank whose collectives differ from its group's.
        agent_code: the agent's exit code.
        aborted: ranks that native code aborted in a collective.
    """
    own = [event for event in events if not is_lost_peer(event)]
    if own:
        return failure_from_event(own[0])
    if agent_code is not None and agent_code < 0:
        name, meaning = describe_exit(agent_code)
        return Failure(attempt, None, "", "", step, name, f"{meaning}; its workers were ended with it")
    reported = {event.get("rank") for event in events}
    outlived = [rank for rank in ranks.values() if rank.outlived_peer and rank.progress.rank not in reported]
    silent = [
        rank for rank in ranks.values() if rank.ended and not rank.outlived_peer and rank.progress.rank not in reported
    ]
    codes = {rank.progress.rank: exit_description(rank, exit_codes) for rank in silent}
    # The agent ends the other workers by SIGTERM, so a death by any other signal came first.
    killed = [rank for rank in silent if codes[rank.progress.rank] not in (None, 0, -signal.SIGTERM)]
    if culprit is not None and culprit.rank in ranks and all(rank.progress.rank in aborted for rank in killed):
        return _failure_location(attempt, ranks[culprit.rank], "collective mismatch", culprit.message)
    if outlived and not silent:  # the collectives of the others timed out waiting for it
        behind = min(outlived, key=lambda rank: rank.progress.step)
        return _failure_location(
            attempt, behind, "hang", "the other ranks waited for it until their collectives timed out"
        )
    if silent:
        rank = min(killed or silent, key=lambda rank: rank.progress.time)
        return _failure_location(attempt, rank, *describe_exit(codes[rank.progress.rank]))
    if events:
        return failure_from_event(events[0])
    exit_text = "ended" if agent_code is None else f"exit code {agent_code}"
    return Failure(attempt, None, "", "starting", step, exit_text, "no worker reported an error")


def name_out_of_memory(failure: Failure, before: OomKills) -> Failure:
    """Name the out-of-memory killer in a failure by SIGKILL, if it killed a process since `before`."""
    found = before.since() if failure.exception == signal.SIGKILL.name else None
    return failure if found is None else replace(failure, message=str(found))


def name_broken_backend(failure: Failure, log: Path) -> Failure:
    """Name the package that ended the agent before it started a worker, if its log ends with torch's error about it."""
    if failure.rank is not None or not log.is_file():
        return failure
    broken = broken_backend(log.read_text(encoding="utf-8", errors="replace"))
    return failure if broken is None else replace(failure, exception=BROKEN_TORCH, message=str(broken))


def hang_failure(attempt: int, behind: Rank | None, step: int, silent_seconds: float, reason: str = "") -> Failure:
    """Describe a hang of `silent_seconds`; `behind` is the rank that the others wait for, `reason` the evidence."""
    message = f"no progress on any rank for {silent_seconds:.0f} s" + (f": {reason}" if reason else "")
    if behind is None:
        return Failure(attempt, None, "", "starting", step, "hang", message)
    return _failure_location(attempt, behind, "hang", message)


def _failure_location(attempt: int, rank: Rank, exception: str, message: str) -> Failure:
    progress = rank.progress
    return Failure(attempt, progress.rank, progress.coordinates, progress.phase, progress.step, exception, message)


def exit_description(rank: Rank, exit_codes: Mapping[int, int]) -> int | None:
    """Return a rank's exit code, negative for a signal; None if it is not known."""
    return exit_codes.get(rank.progress.pid, rank.return_code)
