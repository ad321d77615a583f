"""Watching a launch from start to end: crashes, hangs, stop requests, and what its end means."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megalaunch.config.schema import RunSpec
from megalaunch.launch.agent import Agent
from megalaunch.launch.agent_log import exit_codes
from megalaunch.launch.failure import Failure, first_failure, hang_failure
from megalaunch.launch.follow import LineFollower
from megalaunch.launch.lock import RunLock
from megalaunch.launch.out_of_step import differing, out_of_step
from megalaunch.launch.process import Process, send_signal, wait_for_any_end
from megalaunch.launch.question import ask
from megalaunch.launch.ranks import Rank, Ranks
from megalaunch.launch.stop import StopSignals
from megalaunch.launch.view import RunView
from megalaunch.rundir.events import EventName, record_event
from megalaunch.rundir.lines import Record
from megalaunch.rundir.outcome import ExitCode, Outcome, read_outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.trail import read_trail

POLL_SECONDS = 0.2
SETTLE_SECONDS = 0.5  # the agent's log names the dead within 0.1 s
LOST_PEER_SECONDS = 5.0  # workers that hang on after one has died get no more; the agent alone would give them 30
STARTING_SECONDS = 120.0  # loading torch from a cold disk shows no progress, whatever launcher.timeout says
TEARDOWN_SECONDS = 20.0  # from a written outcome to the end of all processes
SAME_FAILURES = 3


class Display(Protocol):
    """Draws a RunView; neither call may block for long."""

    def say(self, line: str) -> None:
        """Show one line that stays."""

    def update(self, view: RunView) -> None:
        """Show what is new."""

    def close(self) -> None:
        """Leave the terminal as it was."""


@dataclass(frozen=True)
class LaunchEnd:
    """How a launch ended; `failure` is the last failed attempt where the launcher, not a worker, judged the end."""

    outcome: Outcome
    failure: Failure | None = None


class Supervisor:
    """Watches one running agent; `watch` returns when the launch is over, its processes may still have to be ended."""

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        lock: RunLock,
        agent: Agent,
        stop: StopSignals,
        view: RunView,
        display: Display | None,
    ) -> None:
        self._spec, self._directory, self._lock = spec, directory, lock
        self._agent, self._stop, self._view, self._display = agent, stop, view, display
        world = spec.cluster.nodes * int(spec.cluster.devices_per_node)
        self._ranks = Ranks(directory, world, time.monotonic())
        self._events = LineFollower(directory.events, at_end=True)
        self._worker_failures: list[Record] = []
        self._failures: list[Failure] = []
        self._judged: set[int] = set()
        self._failing_since: float | None = None
        self._outcome_since: float | None = None
        self._stop_deadline: float | None = None
        self._asked: set[Process] = set()

    def watch(self) -> LaunchEnd:
        """Block until the launch is over, then say how it ended; outcome.json is written by then."""
        over = agent_ended = False
        while not over and not agent_ended:
            running = [rank.process for rank in self._ranks.alive if rank.process]
            wait_for_any_end([self._agent.process, *running], POLL_SECONDS)
            self._lock.touch()
            agent_ended = self._agent.poll() is not None  # before looking, so that the last look sees all
            over = self._look(time.monotonic(), agent_ended)
        self._agent.end()
        self._show()
        return self._conclude()

    def _look(self, now: float, agent_ended: bool) -> bool:
        """One look at everything; True when the launcher decides that this is the end."""
        renewed = self._ranks.look(now)
        if self._outcome_since is None and self._directory.outcome.exists():
            self._outcome_since = now
        self._show()
        if self._outcome_since is not None:
            late = now - self._outcome_since > TEARDOWN_SECONDS
            # An abort during teardown is no failure, and the agent must not start the workers again for it.
            aborted = renewed or any(rank.return_code for rank in self._ranks.ended)
            return aborted or late or self._stop.count > 1
        self._judge_failures(now, renewed, agent_ended)
        if self._stop.count:
            return self._follow_stop(now)
        if self._is_stuck():
            return True
        if renewed and self._failures:
            self._record("restart", attempt=self._ranks.attempt, reason=_short(self._failures[-1]))
        return not agent_ended and self._is_hung_for_good(now)

    def _show(self) -> None:
        records, _ = self._events.read_new()
        self._worker_failures += [record for record in records if record.get("event") == "worker_failed"]
        if self._display is None:
            return
        try:
            self._view.refresh()
            self._display.update(self._view)
        except Exception as error:  # whatever goes wrong with drawing, the training goes on
            self._display = None
            self._record("note", message=f"the display stopped: {type(error).__name__}: {error}")

    # -- crashes

    def _judge_failures(self, now: float, renewed: bool, agent_ended: bool) -> None:
        if renewed:
            self._judge(self._ranks.attempt - 1, self._ranks.retired)
            self._failing_since = None
        ranks = self._ranks
        if ranks.attempt in self._judged or not (ranks.ended or agent_ended):
            return
        self._failing_since = self._failing_since or now
        waited = now - self._failing_since
        if agent_ended or (not ranks.alive and (waited > SETTLE_SECONDS or self._all_explained())):
            self._judge(ranks.attempt, ranks.known)
        elif waited > LOST_PEER_SECONDS:
            ask(ranks.alive, self._directory)
            for rank in ranks.alive:
                rank.held_on = True
            _kill(ranks.alive)

    def _all_explained(self) -> bool:
        spoke = {event.get("rank") for event in self._worker_failures if event.get("attempt") == self._ranks.attempt}
        return all(rank.return_code is not None or number in spoke for number, rank in self._ranks.known.items())

    def _judge(self, attempt: int, ranks: dict[int, Rank]) -> None:
        if attempt in self._judged:
            return
        self._judged.add(attempt)
        events = [record for record in self._worker_failures if record.get("attempt", attempt) == attempt]
        codes = exit_codes(agent_log(self._directory))
        left = [(number, read_trail(self._directory.trail(number), attempt)) for number in ranks]
        trails = {number: trail for number, trail in left if trail}
        failure = first_failure(attempt, events, ranks, codes, self._ranks.step, differing(trails))
        if failure.rank is None and self._failures:
            return  # the agent's own end, after a failure that is known
        self._note(failure, said=any(event.get("rank") == failure.rank for event in events))

    def _note(self, failure: Failure, said: bool) -> None:
        self._failures.append(failure)
        if not said and failure.rank is not None and not self._stop.count:
            self._record(
                "worker_failed",
                rank=failure.rank,
                coordinates=failure.coordinates,
                phase=failure.phase,
                step=failure.step,
                exception=failure.exception,
                message=failure.message,
                attempt=failure.attempt,
            )

    def _is_stuck(self) -> bool:
        last = self._failures[-SAME_FAILURES:]
        same = len(last) == SAME_FAILURES and all(failure.same_cause(last[0]) for failure in last)
        return same and last[0].rank is not None and last[0].exception != "hang"

    # -- hangs

    def _is_hung_for_good(self, now: float) -> bool:
        """End what no longer moves, so that the agent starts it anew; True when there is nothing to end."""
        silent = now - self._ranks.last_move
        limit = self._spec.launcher.timeout
        if silent <= (limit if self._ranks.stepping else max(limit, STARTING_SECONDS)):
            return False
        trails = ask(self._ranks.alive, self._directory)
        suspect = None if any(rank.is_stopped for rank in self._ranks.alive) else out_of_step(trails)
        behind = self._ranks.known[suspect.rank] if suspect else self._ranks.furthest_behind()
        self._judged.add(self._ranks.attempt)
        reason = suspect.message if suspect else ""
        self._note(hang_failure(self._ranks.attempt, behind, self._ranks.step, silent, reason), said=False)
        if behind is None:
            return True
        # All at once: the others wait in a collective and would only be ended 30 s after the agent asked them to.
        _kill([behind])
        _kill(self._ranks.alive)
        self._ranks.restart_clock(now)
        return False

    # -- stop requests

    def _follow_stop(self, now: float) -> bool:
        """Pass the request on, once to each worker; True when waiting any longer is no use."""
        if self._stop_deadline is None:
            self._stop_deadline = now + self._spec.launcher.grace
            self._record("stop_requested", signal=self._stop.first.name if self._stop.first else "")
        if self._stop.count > 1 or now > self._stop_deadline or not self._ranks.known:
            return True
        for rank in self._ranks.alive:
            if rank.process and rank.process not in self._asked:
                self._asked.add(rank.process)
                send_signal(rank.process, self._stop.forwarded)
        # A worker that is gone without an outcome cannot save any more, nor can the others without it.
        waited = 0.0 if self._failing_since is None else now - self._failing_since
        return self._ranks.attempt in self._judged or waited > LOST_PEER_SECONDS

    # -- the end

    def _conclude(self) -> LaunchEnd:
        written = read_outcome(self._directory.outcome)
        if written is not None:
            return LaunchEnd(written)
        failure = self._failures[-1] if self._failures else None
        if self._stop.count:
            code, failure = self._stop.exit_code, None
            reason = "stopped before the workers had saved; the run continues from its newest checkpoint"
        elif failure is None:
            code, reason = ExitCode.CRASH, "the agent ended without an outcome"
        else:
            code = ExitCode.HANG if failure.exception == "hang" else ExitCode.CRASH
            code = ExitCode.NO_PROGRESS if self._is_stuck() else code
            reason = f"{failure.who}: {failure.what}"
        details: dict[str, Any] = {} if failure is None else {**vars(failure), "attempts": len(self._failures)}
        outcome = Outcome(int(code), reason, self._view.step, details)
        with contextlib.suppress(OSError):  # a full disk: the exit code and the report still say it
            write_outcome(self._directory.outcome, outcome)
        self._record("outcome", exit_code=outcome.exit_code, reason=reason)
        return LaunchEnd(outcome, failure)

    def _record(self, event: EventName, **details: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep the launcher from its duty
            record_event(self._directory, event, **details)


def agent_log(directory: RunDirectory) -> Path:
    """Where the agent's own output goes."""
    return directory.logs / "agent.log"


def _kill(ranks: list[Rank]) -> None:
    for rank in ranks:
        if rank.process:
            send_signal(rank.process, signal.SIGKILL)


def _short(failure: Failure) -> str:
    return f"{failure.who} failed at step {failure.step}: {failure.what}"[:300]
