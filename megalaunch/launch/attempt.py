"""One attempt: an elastic agent and its workers, whose failures (`failure.py`) and hangs (`hang/`) are diagnosed."""

from __future__ import annotations

import signal
import time

from megalaunch.launch.agent import Agent, exit_codes
from megalaunch.launch.failure import (
    exit_description,
    first_failure,
    hang_failure,
    name_broken_backend,
    name_out_of_memory,
)
from megalaunch.launch.hang.collective_traces import request_traces
from megalaunch.launch.hang.diagnosis import diagnose_crash, diagnose_hang
from megalaunch.launch.hang.hang_detector import HangDetector
from megalaunch.launch.hang.rank_monitor import RankMonitor
from megalaunch.launch.stop import StopSignals
from megalaunch.plan.world import resolved_world_size
from megalaunch.platform.cgroups import OomKills
from megalaunch.process import Process, is_alive, kill_all, send_signal
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.worker_failure import Failure
from megalaunch.schema import RunSpec

SETTLE_SECONDS = 0.5  # the agent logs a worker's exit code within 0.1 s
LOST_PEER_SECONDS = 5.0  # time limit of workers after a peer died; the agent alone would give them 30
_LOST_PEER_IN_JOIN_SECONDS = 1.0  # a worker that waits for the others to join would not see for minutes that one died


class Attempt:
    """One attempt, from the start of an agent to its end. Call `poll` first, then `failed`."""

    def __init__(self, number: int, spec: RunSpec, directory: RunDirectory, agent: Agent) -> None:
        self.number, self.agent = number, agent
        self._directory = directory
        self.ranks = RankMonitor(directory, resolved_world_size(spec.cluster), number)
        self._hang_detector = HangDetector(spec, time.monotonic())
        self._oom_kills = OomKills.count()
        self._events: list[Record] = []  # worker_failed
        self._signalled: set[Process] = set()  # workers that were sent a stop signal
        self.agent_code: int | None = None
        self.failing_since: float | None = None

    @property
    def processes(self) -> list[Process]:
        """The agent, and the workers that run."""
        return [self.agent.process, *(rank.process for rank in self.ranks.alive if rank.process)]

    def add_event(self, event: Record) -> None:
        """Add an event of the run; only a `worker_failed` event of this attempt is stored."""
        if event.get("event") == "worker_failed" and event.get("attempt", self.number) == self.number:
            self._events.append(event)

    def poll(self, now: float, silence_excused: bool) -> None:
        """Update the state of the agent, the ranks and the hang detector.

        Args:
            now: the time of `time.monotonic`.
            silence_excused: ranks may make progress that cannot be seen: it does not count as a hang.
        """
        self.agent_code = self.agent.poll()  # before the ranks, so that the last refresh includes all of them
        moved = self.ranks.refresh()
        self._hang_detector.poll(now, self.ranks, moved or silence_excused)
        if self.failing_since is None and (self.ranks.ended or self.agent_code is not None):
            self.failing_since = now

    def failed(self, now: float) -> Failure | None:
        """Return why the attempt failed, once that is known; None while it runs, or if it ended without failure.

        Workers that still run LOST_PEER_SECONDS after a peer died, or sooner while they join, are killed, after their
        traces are requested.
        """
        if self.failing_since is None:
            return self._diagnose_hang() if self._hang_detector.is_hung(self.ranks) else None
        waited = now - self.failing_since
        if self.agent_code is None and not is_alive(self.agent.process):
            return None  # it died a moment ago with its workers: the next poll has the exit code
        if self.agent_code is not None or (
            not self.ranks.alive and (waited > SETTLE_SECONDS or self._all_exit_codes_known)
        ):
            return None if self.agent_code == 0 else self._diagnose()
        limit = _LOST_PEER_IN_JOIN_SECONDS if self.ranks.are_joining else LOST_PEER_SECONDS
        if waited > limit and self.ranks.alive:
            request_traces(self.ranks.alive, self._directory)
            for rank in self.ranks.alive:
                rank.outlived_peer = True
            kill_all([rank.process for rank in self.ranks.alive if rank.process], 0)
        return None

    def has_reported(self, rank: int | None) -> bool:
        """Return whether this rank recorded its failure itself (a `worker_failed` event)."""
        return any(event.get("rank") == rank for event in self._events)

    def forward_signal(self, stop: StopSignals) -> None:
        """Send a stop signal to each worker that has not been sent one."""
        for rank in self.ranks.alive:
            if rank.process and rank.process not in self._signalled:
                self._signalled.add(rank.process)
                send_signal(rank.process, stop.signal_for_workers)

    @property
    def _all_exit_codes_known(self) -> bool:
        return all(
            rank.return_code is not None or self.has_reported(number) for number, rank in self.ranks.known.items()
        )

    def _diagnose(self) -> Failure:
        """Find the first failure, from exit codes, recorded exceptions and collective traces."""
        codes = exit_codes(self._directory.agent_log)
        ranks = self.ranks.known
        sigabrt = {number for number, rank in ranks.items() if exit_description(rank, codes) == -signal.SIGABRT}
        crash = diagnose_crash(self.ranks, self.number, sigabrt, self._directory)
        failure = first_failure(
            self.number, self._events, ranks, codes, self.ranks.step, crash.culprit, self.agent_code, crash.aborted
        )
        return name_out_of_memory(name_broken_backend(failure, self._directory.agent_log), self._oom_kills)

    def _diagnose_hang(self) -> Failure:
        hung = diagnose_hang(self.ranks, self._directory)
        return hang_failure(self.number, hung.rank, self.ranks.step, self._hang_detector.silent, hung.reason)
