"""Supervise a launch from start to end: attempts, restarts, stop requests, and its outcome and exit code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megalaunch.format.numbers import format_duration
from megalaunch.launch.agent import Agent
from megalaunch.launch.attempt import LOST_PEER_SECONDS, Attempt
from megalaunch.launch.failure import SUPERSEDED, record_failure
from megalaunch.launch.lock import RunLock
from megalaunch.launch.run_state import RunState
from megalaunch.launch.stop import StopSignals
from megalaunch.launch.storage_monitor import StorageMonitor
from megalaunch.process import wait_for_any_end
from megalaunch.rundir.checkpoint.listing import newest_step
from megalaunch.rundir.events import EventName
from megalaunch.rundir.outcome import ExitCode, Outcome, read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.tail import JsonlTail
from megalaunch.rundir.worker_failure import Failure, is_no_progress
from megalaunch.schema import RunSpec

POLL_SECONDS = 0.2
TEARDOWN_SECONDS = 20.0  # from a written outcome to the end of all processes
LONGEST_PAUSE = 300.0  # between two restarts, seconds


class Display(Protocol):
    """Draws a RunState; no call may block for long."""

    def say(self, line: str) -> None:
        """Print one line that stays on the screen."""

    def update(self, view: RunState) -> None:
        """Draw the new state."""

    def close(self) -> None:
        """Restore the terminal."""


@dataclass(frozen=True)
class LaunchResult:
    """The outcome of a launch; `failure` is the last failed attempt if the launcher wrote the outcome."""

    outcome: Outcome
    failure: Failure | None = None


class Drawing:
    """Draws a run. An error of the display turns it off, and does not stop the training."""

    def __init__(self, storage: StorageMonitor, view: RunState, display: Display | None) -> None:
        self._storage, self._view, self._display = storage, view, display

    def update(self) -> None:
        """Read what the workers have appended, and draw it."""
        if self._display is None:
            return
        try:
            self._view.refresh()
            self._view.fresh_events = self._storage.without_known_waits(self._view.fresh_events)
            for line in self._storage.take_lines():
                self._display.say(line)
            self._display.update(self._view)
        except Exception as error:
            self._display = None
            message = f"the display failed and is off: {type(error).__name__}: {error}"
            self._storage.record("note", message=message)


class RestartBudget:
    """At most `max_restarts` restarts in a row; each new checkpoint resets the count.

    The first restart is immediate, since most faults occur once. The second waits `backoff` seconds, and each further
    one twice as long as the one before, up to LONGEST_PAUSE, since a fault of the machine may pass.
    """

    def __init__(self, max_restarts: int, backoff: float, saved_step: int = 0) -> None:
        self._max, self._backoff, self._saved_step = max_restarts, backoff, saved_step
        self.used = 0

    def checkpoint_saved(self, step: int) -> None:
        """Reset the count after a checkpoint of a new step; a checkpoint of an earlier step is no progress."""
        if step > self._saved_step:
            self._saved_step, self.used = step, 0

    def take(self) -> float | None:
        """Use one restart: return the seconds to wait before it, or None when none is left."""
        if self.used >= self._max:
            return None
        pause = 0.0 if self.used == 0 else min(LONGEST_PAUSE, self._backoff * 2.0 ** (self.used - 1))
        self.used += 1
        return pause


class Supervisor:
    """Runs attempts one after the other, each with an agent from `start_agent(attempt)`, until the launch is over.

    An agent never restarts its workers: the supervisor decides whether, when and how often they restart.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        lock: RunLock,
        start_agent: Callable[[int], Agent],
        stop: StopSignals,
        view: RunState,
        display: Display | None,
    ) -> None:
        self._spec, self._directory = spec, directory
        self._start_agent, self._stop, self._view = start_agent, stop, view
        self._storage = StorageMonitor(directory, spec.run.storage_timeout, lock.touch)
        self._drawing = Drawing(self._storage, view, display)
        self._events = JsonlTail(directory.events, at_end=True)
        newest = newest_step(directory.checkpoints)
        self._budget = RestartBudget(spec.launcher.max_restarts, spec.launcher.restart_backoff, newest)
        self._failures: list[Failure] = []
        self._attempts = 0
        self._outcome_since: float | None = None
        self._stop_deadline: float | None = None

    def watch(self) -> LaunchResult:
        """Block until the launch is over and its processes are gone, then write outcome.json and return the result."""
        while self._run(self._attempts) and self._may_restart(self._attempts):
            pass
        self._storage.poll_last(time.monotonic())
        self._show(None)
        return self._finish()

    def _run(self, number: int) -> bool:
        """Run one attempt until all its processes have ended; True when it failed and a restart may help."""
        self._attempts += 1
        try:
            attempt = Attempt(number, self._spec, self._directory, self._start_agent(number))
        except OSError as error:
            message = f"the agent could not be started: {error}"
            self._failures.append(Failure(number, None, "", "starting", 0, type(error).__name__, message))
            return False
        try:
            over = False
            while not over:
                wait_for_any_end(attempt.processes, POLL_SECONDS)
                self._keep_directory()
                over = self._poll(attempt, time.monotonic())
        finally:
            attempt.agent.kill_tree()
        last = self._last_failure
        if last is None or last.exception == SUPERSEDED or self._stop.count or self._has_outcome:
            return False
        could_not_start = last.rank is None and (attempt.agent_code or 0) > 0
        return not (could_not_start or is_no_progress(self._failures)) and self._becomes_writable()

    def _keep_directory(self) -> None:
        """Keep the lock, and the knowledge whether the run directory can be written. Cheap to call often."""
        self._storage.poll(time.monotonic())

    def _becomes_writable(self) -> bool:
        """Wait until the run directory can be written; False after the deadline, or a stop request."""
        began = time.monotonic()
        while (unwritable := self._storage.unwritable_reason()) or self._storage.is_failing:
            waited = max(time.monotonic() - began, self._storage.seconds)
            if self._stop.count or waited >= self._spec.run.storage_timeout:
                break
            time.sleep(POLL_SECONDS)
            self._keep_directory()
            self._show(None)
        return unwritable is None

    @property
    def _has_outcome(self) -> bool:
        try:
            return self._directory.outcome.exists()
        except OSError:  # of storage that fails
            return False

    def _poll(self, attempt: Attempt, now: float) -> bool:
        """Poll the attempt once; True when it is over."""
        attempt.poll(now, self._storage.excuses_silence(now))
        if self._outcome_since is None and self._has_outcome:
            self._outcome_since = now
        self._show(attempt)
        agent_ended = attempt.agent_code is not None
        if self._outcome_since is not None:
            late = now - self._outcome_since > TEARDOWN_SECONDS
            aborted = any(rank.return_code for rank in attempt.ranks.ended)  # an abort during teardown is no failure
            return agent_ended or aborted or late or self._stop.count > 1
        failure = attempt.failed(now)
        if failure is not None:
            self._record_failure(failure, reported=attempt.has_reported(failure.rank))
        over = agent_ended or failure is not None
        return self._forward_stop(attempt, now) or over if self._stop.count else over

    def _show(self, attempt: Attempt | None) -> None:
        records, _ = self._events.read_new()
        for record in records:
            if attempt is not None:
                attempt.add_event(record)
            if record.get("event") == "checkpoint" and isinstance(step := record.get("step"), int):
                self._budget.checkpoint_saved(step)
        self._drawing.update()

    # -- failures

    def _record_failure(self, failure: Failure, reported: bool) -> None:
        self._failures.append(failure)
        if not reported and failure.rank is not None and not self._stop.count:
            record_failure(self._storage, failure)

    @property
    def _last_failure(self) -> Failure | None:
        """Why the newest attempt failed, if it did."""
        last = self._failures[-1] if self._failures else None
        return last if last and last.attempt == self._attempts - 1 else None

    def _may_restart(self, number: int) -> bool:
        """Wait until attempt `number` may start; False without restarts left, or after a stop request."""
        pause = self._budget.take()
        if pause is None:
            return False
        self._record("restart", attempt=number, reason=self._failures[-1].summary, pause_seconds=pause)
        begins = time.monotonic() + pause
        while not self._stop.count and time.monotonic() < begins:
            self._keep_directory()
            self._show(None)
            time.sleep(min(POLL_SECONDS, pause))
        return not self._stop.count

    # -- stop requests

    def _forward_stop(self, attempt: Attempt, now: float) -> bool:
        """Forward the stop request to the workers; True when further waiting is useless."""
        if self._stop_deadline is None:
            self._stop_deadline = now + self._spec.launcher.stop_grace_period
            self._record("stop_requested", signal=self._stop.first.name if self._stop.first else "")
        if self._stop.count > 1 or now > self._stop_deadline or not attempt.ranks.known:
            return True
        attempt.forward_signal(self._stop)
        # A worker that ended without an outcome cannot save, and the others cannot save without it.
        return attempt.failing_since is not None and now - attempt.failing_since > LOST_PEER_SECONDS

    # -- the end

    def _finish(self) -> LaunchResult:
        written = read_outcome(self._directory.outcome)
        if written is not None:
            return LaunchResult(written)
        failure = self._last_failure
        if failure is not None and failure.exception == SUPERSEDED:  # the run directory belongs to others now
            log = "the agent's log" if failure.rank is None else self._directory.rank_log(failure.rank)
            reason = f"later workers have taken over the run (see {log}); nothing was changed since"
            return LaunchResult(Outcome(int(ExitCode.PREEMPTED), reason, self._view.step))
        unwritable = self._storage.unwritable_reason()
        if self._stop.count:
            code, failure = self._stop.exit_code, None
            why = f" ({unwritable})" if unwritable else ""
            reason = f"stopped before the workers saved{why}; run the same command to resume from the newest checkpoint"
        elif unwritable is not None:
            code, failure = ExitCode.CHECKPOINT, None
            waited = self._storage.seconds
            after = f" (the run waited {format_duration(waited)} for it: run.storage_timeout)" if waited >= 1 else ""
            reason = f"{unwritable}{after}; make it writable, then run the same command to resume"
        elif failure is None:
            code, reason = ExitCode.CRASH, "the workers ended without an error and without outcome.json"
        else:
            code = ExitCode.NO_PROGRESS if is_no_progress(self._failures) else failure.exit_code
            reason = f"{failure.source}: {failure.error}"
        details: dict[str, Any] = {} if failure is None else {**vars(failure), "attempts": len(self._failures)}
        if failure is not None:
            details["restarts_in_a_row"] = self._budget.used
        outcome = Outcome(int(code), reason, self._view.step, details)
        self._storage.write_outcome(outcome)
        self._record("outcome", exit_code=outcome.exit_code, reason=reason)
        return LaunchResult(outcome, failure)

    def _record(self, event: EventName, **details: Any) -> None:
        self._storage.record(event, **details)
