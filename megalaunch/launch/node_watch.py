"""Watch the workers of one of several nodes for hangs: name the hung rank, and end the workers of this node.

Every node measures the silence of its own ranks, since the records of others may arrive late through a shared file
system. Before it declares a hang it reads those of all ranks. The launcher of a node whose rank is stopped, or busy and
without an answer, names it, else that of node 0, from the traces that each launcher requests from its own ranks. All
see the `worker_failed` event and kill their workers; the agents, or who started them, restart the run.
"""

from __future__ import annotations

import time

from megalaunch.launch.failure import hang_failure, record_failure
from megalaunch.launch.hang.collective_traces import REPLY_SECONDS, request_traces
from megalaunch.launch.hang.diagnosis import HungRank, diagnose_hang, diagnose_silent_rank
from megalaunch.launch.hang.hang_detector import STEP_SECONDS, HangDetector
from megalaunch.launch.hang.rank_monitor import Rank, RankMonitor
from megalaunch.launch.storage_monitor import StorageMonitor
from megalaunch.plan.world import resolved_world_size
from megalaunch.process import kill_all
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress
from megalaunch.rundir.tail import JsonlTail
from megalaunch.schema import RunSpec

_LOOK_SECONDS = STEP_SECONDS / 2  # of silence, before a look at the events of other nodes; between two at their ranks
_PROBE_SECONDS = 2.0  # of silence, after which the storage is probed
_OTHERS_SECONDS = 3.0  # from the name of the hung rank to the end of the workers: other nodes request stacks
_REPORT_SECONDS = 3 * REPLY_SECONDS  # after which any node reports the hang, since those that should have not


class NodeWatch:
    """Watches the workers of one node over all attempts of its agent."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, node: int, storage: StorageMonitor) -> None:
        self._spec, self._directory, self._node, self._storage = spec, directory, node, storage
        workers = int(spec.cluster.devices_per_node)
        self._local = range(node * workers, (node + 1) * workers)
        self._failures = _Failures(directory)
        self._attempt: _NodeAttempt | None = None

    @property
    def is_hung(self) -> bool:
        """Whether the newest attempt was found to hang, on any node."""
        return self._attempt is not None and self._failures.has_hang(self._attempt.ranks.attempt)

    def poll(self, now: float) -> None:
        """Look at the workers, and end them once they hang; call several times a second.

        Args:
            now: the time of `time.monotonic`.
        """
        record = read_progress(self._directory.progress(self._local[0]))
        if record is None:
            return
        if self._attempt is None or self._attempt.ranks.attempt != record.attempt:
            world = resolved_world_size(self._spec.cluster)
            ranks = RankMonitor(self._directory, world, record.attempt, self._local)
            detector = HangDetector(self._spec, now)
            reports_hangs = self._node == 0
            self._attempt = _NodeAttempt(ranks, detector, self._failures, self._directory, self._storage, reports_hangs)
        self._attempt.poll(now)


class _Failures:
    """The `worker_failed` events since this launch began, in the order of the file: clocks may differ or jump."""

    def __init__(self, directory: RunDirectory) -> None:
        self._tail = JsonlTail(directory.events, at_end=True)
        self._events: list[Record] = []

    def of(self, attempt: int) -> list[Record]:
        """Return those of an attempt."""
        self._events += [event for event in self._tail.read_new()[0] if event.get("event") == "worker_failed"]
        return [event for event in self._events if event.get("attempt") == attempt]

    def has_hang(self, attempt: int) -> bool:
        """Return whether a node has named the hung rank of an attempt."""
        return any(event.get("exception") == "hang" for event in self.of(attempt))


class _NodeAttempt:
    """The workers of one node in one attempt.

    Args:
        reports_hangs: this node names the hung rank where no rank is stopped.
    """

    def __init__(
        self,
        ranks: RankMonitor,
        detector: HangDetector,
        failures: _Failures,
        directory: RunDirectory,
        storage: StorageMonitor,
        reports_hangs: bool,
    ) -> None:
        self.ranks, self._detector, self._failures = ranks, detector, failures
        self._directory, self._storage, self._reports_hangs = directory, storage, reports_hangs
        self._next_look = self._look_interval
        self._first_look: float | None = None  # of this silence
        self._hung_since: float | None = None
        self._kill_at: float | None = None

    def poll(self, now: float) -> None:
        """Look at the workers; once the hung rank is named, end those of this node."""
        moved = self.ranks.refresh()
        if self._kill_at is not None:
            if now >= self._kill_at:
                kill_all([rank.process for rank in self.ranks.local if rank.process and not rank.ended], 0)
            return
        if not self.ranks.local or self.ranks.ended:
            return  # the agents end what is left
        if moved:
            self.ranks.forget_others()
        self._detector.poll(now, self.ranks, moved or self._others_move() or self._is_excused(now))
        silent = self._detector.silent
        if not silent:
            self._first_look = self._hung_since = None
        self._next_look = min(self._next_look, silent + self._look_interval)
        if silent >= min(_LOOK_SECONDS, self._detector.limit(self.ranks)):
            self._find_hang(now)

    @property
    def _look_interval(self) -> float:
        """Seconds between two looks at the ranks of other nodes: few within a limit, since each reads a file a rank."""
        limit = self._detector.limit(self.ranks)
        return min(max(_LOOK_SECONDS, limit / 4), limit / 2)

    def _others_move(self) -> bool:
        """Look at the ranks of other nodes if that is due; return whether any has progressed since the last look."""
        silent = self._detector.silent
        if silent < self._next_look:
            return False
        self._next_look = silent + self._look_interval
        if self._first_look is None:
            self._first_look = silent
        return self.ranks.look_at_others()

    def _is_excused(self, now: float) -> bool:
        """Return whether the storage may keep progress from being seen; it is probed only during silence."""
        if self._detector.silent > _PROBE_SECONDS or self._storage.is_failing:
            self._storage.poll(now)
        return self._storage.excuses_silence(now)

    def _find_hang(self, now: float) -> None:
        """Declare a hang once the limit of the phase is over, or another node has named the hung rank."""
        if self._failures.has_hang(self.ranks.attempt):
            if self._hung_since is None:
                request_traces(self._running, self._directory)
            self._kill_at = now
            return
        if self._hung_since is None:
            if not self._detector.is_hung(self.ranks) or not self._others_were_silent:
                return
            if self.ranks.look_at_others():
                self._detector.poll(now, self.ranks, moved=True)
                self._first_look = None
                return
            self._hung_since = now
            if not self._is_reporter:
                answers = request_traces(self._running, self._directory)
                silent = diagnose_silent_rank(self.ranks, self._directory, answers)
                if silent is not None:
                    self._report(silent)
                    return
        if self._is_reporter or now - self._hung_since > _REPORT_SECONDS:
            attempt = self.ranks.attempt
            self._report(diagnose_hang(self.ranks, self._directory, lambda: self._failures.has_hang(attempt)))

    @property
    def _others_were_silent(self) -> bool:
        """Whether the first look is long enough ago: the limit falls at once when a rank is stopped."""
        return self._first_look is not None and self._detector.silent >= self._first_look + self._look_interval

    @property
    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks.local if not rank.ended]

    @property
    def _is_reporter(self) -> bool:
        return self._reports_hangs or any(rank.is_stopped for rank in self._running)

    def _report(self, hung: HungRank) -> None:
        """Write the `worker_failed` event of the hung rank, unless a failure of another rank has led to the silence."""
        attempt = self.ranks.attempt
        if not self._failures.of(attempt):
            failure = hang_failure(attempt, hung.rank, self.ranks.step, self._detector.silent, hung.reason)
            record_failure(self._storage, failure)
        self._kill_at = time.monotonic() + _OTHERS_SECONDS
