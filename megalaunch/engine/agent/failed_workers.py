"""Record the workers of a node that ended without a word, such as those that a signal killed, and their restarts.

The launcher of a run on one node sees how its workers ended. On several nodes only the agents do, which reap them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping

from megalaunch.engine.agent.output import log
from megalaunch.platform.cgroups import OomKill, OomKills
from megalaunch.rundir.environment import current_attempt
from megalaunch.rundir.events import record_event
from megalaunch.rundir.failed_attempts import last_failures
from megalaunch.rundir.jsonl import Record, read_lines
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress
from megalaunch.rundir.tail import JsonlTail
from megalaunch.rundir.worker_failure import Failure, describe_exit, is_lost_peer

_NO_FAILURE = (None, 0, -signal.SIGTERM, ExitCode.PREEMPTED)  # the agent ends the other workers by SIGTERM


class FailedWorkers:
    """Writes the `worker_failed` events of this node's workers, over all attempts of its agent; on node 0 `restart`."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._tail = JsonlTail(directory.events, at_end=True)
        self._oom_kills = OomKills.count()
        self._is_superseded = False  # later workers have taken over the run, so that its events are theirs

    def record(self, exit_codes: Mapping[int, int | None]) -> None:
        """Record the workers of the newest attempt that failed without a word, unless the cause has been recorded.

        Args:
            exit_codes: by rank, negative for a signal; the first failure first.
        """
        kill, self._oom_kills = self._oom_kills.since(), OomKills.count()
        self._is_superseded = ExitCode.PREEMPTED in exit_codes.values()
        attempt = current_attempt(os.environ)
        events = [event for event in self._tail.read_new()[0] if _is_failure(event, attempt)]
        if not all(map(is_lost_peer, events)):
            return
        reported = {event.get("rank") for event in events}
        for rank, code in exit_codes.items():
            if rank not in reported and code not in _NO_FAILURE:
                with contextlib.suppress(OSError):  # storage that fails must not end the agent
                    self._record(attempt, rank, code, kill)

    def cause(self, attempt: int) -> Failure | None:
        """Return the recorded cause of an attempt's failure, of any node, if it is the newest. Raises OSError."""
        failures = last_failures(read_lines(self._directory.events))
        return failures[-1] if failures and failures[-1].attempt == attempt else None

    def record_restart(self) -> None:
        """Record that the agents of all nodes start the next attempt, with the cause of the failure of the last one.

        Not that of superseded workers, which ended with `ExitCode.PREEMPTED`: the next ones will do so too.
        """
        if self._is_superseded:
            return
        attempt = current_attempt(os.environ)
        with contextlib.suppress(OSError):  # as above
            failure = self.cause(attempt - 1)
            reason = "the workers of a node failed" if failure is None else failure.summary
            record_event(self._directory, "restart", attempt=attempt, reason=reason, pause_seconds=0.0)

    def _record(self, attempt: int, rank: int, code: int | None, kill: OomKill | None) -> None:
        exception, message = describe_exit(code)
        if kill is not None and exception == signal.SIGKILL.name:
            message = str(kill)
        progress = read_progress(self._directory.progress(rank))
        if progress is not None and progress.attempt != attempt:
            progress = None
        record_event(
            self._directory,
            "worker_failed",
            rank=rank,
            coordinates=progress.coordinates if progress else "",
            phase=progress.phase if progress else "starting",
            step=progress.step if progress else 0,
            exception=exception,
            message=message,
            attempt=attempt,
        )


def log_exit_codes(pids: Mapping[int, int], exit_codes: Mapping[int, int | None]) -> None:
    """Print how each worker that has ended did, for the launcher (`launch.agent.exit_codes`).

    The launcher sees a dead worker only until the agent has reaped it, and torch names but the first failure it sees.
    """
    for rank, pid in pids.items():
        if (code := exit_codes.get(rank)) is not None:
            log(f"rank {rank}: exitcode: {code} (pid: {pid})")


def _is_failure(event: Record, attempt: int) -> bool:
    return event.get("event") == "worker_failed" and event.get("attempt") == attempt
