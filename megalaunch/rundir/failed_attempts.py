"""Why the last attempts of a run in a row failed, over all launches that restarted it, and what outcome that is."""

from __future__ import annotations

from collections.abc import Iterable

from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.outcome import ExitCode, Outcome
from megalaunch.rundir.worker_failure import Failure, failure_from_event, is_lost_peer, is_no_progress


def last_failures(events: Iterable[Record]) -> list[Failure]:
    """Return the causes of the failed attempts with consecutive numbers up to the newest one, in their order.

    An attempt without a `worker_failed` event, such as one whose node was lost, ends the row, and so does a new start,
    which counts from 0 again.

    Args:
        events: of the run, in the order of the file: clocks may differ or jump.
    """
    causes: list[Record] = []
    is_new_launch = False
    for event in events:
        is_new_launch |= event.get("event") == "launch"
        attempt = event.get("attempt")
        if event.get("event") != "worker_failed" or not isinstance(attempt, int):
            continue
        before = causes[-1]["attempt"] if causes else None
        if before == attempt and not is_new_launch:
            if is_lost_peer(causes[-1]) and not is_lost_peer(event):
                causes[-1] = event
        elif before == attempt - 1:
            causes.append(event)
        else:
            causes = [event]
        is_new_launch = False
    return [failure_from_event(cause) for cause in causes]


def failure_outcome(failure: Failure, events: Iterable[Record], step: int, workers_per_node: int) -> Outcome:
    """Return the outcome of a run on several nodes that ends with a failure; exit code 8 if it is the third alike.

    Args:
        failure: of the newest attempt.
        events: of the run.
        step: last finished step.
        workers_per_node: by which the node of a rank is known.
    """
    row = last_failures(events)
    is_stuck = bool(row) and row[-1] == failure and is_no_progress(row)
    details = (
        {}
        if failure.rank is None
        else {"node": failure.rank // workers_per_node, "rank": failure.rank, "phase": failure.phase}
    )
    code = ExitCode.NO_PROGRESS if is_stuck else failure.exit_code
    return Outcome(int(code), f"{failure.source}: {failure.error}", step, details)
