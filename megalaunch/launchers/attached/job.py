"""Run a job on nodes that this process holds: start them together, watch them, start all again after a failure."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megalaunch.launch.supervise import RestartBudget
from megalaunch.launchers.attached.node import HeldNode
from megalaunch.launchers.attached.remote_agent import LEASE_SECONDS, NodeOrder
from megalaunch.launchers.launcher import Job, JobStatus, LauncherError
from megalaunch.rundir.events import record_event
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory, checkpoint_step

_POLL_SECONDS = 0.1
_START_SECONDS = 60.0  # after the connection: Python starts, and looks for the run directory
_SAME_END_SECONDS = 60.0  # from the end of one node to that of all, if the run has ended on purpose
_FAILED_SECONDS = 5.0  # the same after a failure, so that node 0 can write why
_ON_PURPOSE = (
    *(ExitCode.DONE, ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.NON_FINITE),
    *(ExitCode.NO_PROGRESS, ExitCode.PREEMPTED, ExitCode.INTERRUPTED),
)


def start_nodes(
    connect: Iterable[HeldNode], orders: Sequence[NodeOrder], seconds: float, given_up: Callable[[], bool]
) -> list[HeldNode]:
    """Start the command on all nodes; none is left if one refuses.

    Args:
        connect: connects to one node after the other.
        seconds: for connecting.
        given_up: whether the start has to end.

    Raises:
        LauncherError: a node cannot be started; the reason and the fix are those of the first such node.
    """
    nodes: list[HeldNode] = []
    try:
        for node in connect:
            nodes.append(node)  # one by one: the next may fail
        deadline = time.monotonic() + seconds + _START_SECONDS
        _wait_for("greeting", nodes, deadline, given_up)
        for node in nodes:
            node.require_same_code()
        for node, order in zip(nodes, orders, strict=True):
            node.send(order)
        _wait_for("started", nodes, deadline, given_up)
    except BaseException:
        end_nodes(nodes)
        raise
    return nodes


def _wait_for(record: str, nodes: Sequence[HeldNode], deadline: float, given_up: Callable[[], bool]) -> None:
    while not all(record in node.said for node in nodes):
        for node in nodes:
            over = node.ended
            node.poll()
            if "refused" in node.said:
                raise LauncherError(
                    f"{node} {node.said['refused']}",
                    "type the command in a directory, and with a run.directory, that all hosts share",
                )
            if over and record not in node.said:
                raise node.failure()
            if time.monotonic() > deadline and record not in node.said:
                raise LauncherError(
                    f"{node} does not answer", "see whether its file systems and its processors are busy"
                )
        if given_up():
            raise LauncherError("stopped before the nodes started")
        time.sleep(_POLL_SECONDS)


def end_nodes(nodes: Sequence[HeldNode]) -> bool:
    """Let all agents kill what they have started, all at the same time; return whether all have."""
    for node in nodes:
        node.end_lease()
    ended = [node.wait() for node in nodes]
    return all(ended)


@dataclass(frozen=True)
class _End:
    """How one attempt ended: what the first node to end says, whether to start again, and whether a host was lost.

    The processes of a lost host may go on until their lease is over.
    """

    reason: str
    again: bool
    lost: bool


Start = Callable[[int, Callable[[], bool]], list[HeldNode]]
"""Starts all nodes: gets the number of the attempt, and whether the start has to end. Raises LauncherError."""


class AttachedJob:
    """Watches the nodes in a thread, so that a display that waits does not end their leases."""

    def __init__(self, job: Job, start: Start) -> None:
        """Start all nodes. Raises LauncherError."""
        self._job, self._start = job, start
        self._nodes = start(0, lambda: False)
        self._directory = RunDirectory(job.directory)
        self._hosts = ",".join(node.host for node in self._nodes)
        self._budget = RestartBudget(job.settings.max_restarts, job.settings.restart_backoff, self._saved_step())
        self._stop, self._now = threading.Event(), threading.Event()
        self.status = JobStatus("running", "RUNNING", nodes=self._hosts)
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self, at_once: bool) -> None:
        """Let the workers save and end; `at_once`: end them without a checkpoint."""
        self._stop.set()
        if at_once:
            self._now.set()

    def _run(self) -> None:
        attempt, state = 0, "FAILED"
        try:
            while True:
                end = self._watch()
                if not end.again:
                    state = "CANCELLED" if self._stop.is_set() else "COMPLETED" if not end.reason else "FAILED"
                    break
                self._budget.checkpoint_saved(self._saved_step())
                while (pause := self._budget.take()) is not None:
                    attempt += 1
                    failed = self._start_again(attempt, end, pause)
                    if failed is None:
                        break
                    end = _End(failed, again=True, lost=True)  # no host said that nothing is left
                if pause is None or self._stop.is_set():
                    state = "CANCELLED" if self._stop.is_set() else "FAILED"
                    break
            reason = end.reason
        except OSError as error:
            reason = str(error)
        finally:
            end_nodes(self._nodes)
        self.status = JobStatus("ended", state, reason, self._hosts, attempt)

    def _start_again(self, attempt: int, end: _End, pause: float) -> str | None:
        """Start all nodes after a pause; return why they could not start. Nothing of the last attempt runs by then."""
        pause = max(pause, LEASE_SECONDS) if end.lost else pause
        record_event(self._directory, "restart", attempt=attempt, reason=end.reason, pause_seconds=pause)
        self.status = JobStatus("running", "RESTARTING", end.reason, self._hosts, attempt)
        if self._stop.wait(pause):
            return end.reason
        with contextlib.suppress(FileNotFoundError):
            self._directory.outcome.unlink()  # it is that of the attempt that failed
        try:
            self._nodes = self._start(attempt, self._stop.is_set)
        except LauncherError as error:
            return str(error)
        self.status = JobStatus("running", "RUNNING", nodes=self._hosts, restarts=attempt)
        return None

    def _watch(self) -> _End:
        """Watch the nodes until all have ended; the first that ended tells how. None is left."""
        first: HeldNode | None = None
        deadline, told = float("inf"), False
        while not all(node.ended for node in self._nodes) and time.monotonic() < deadline and not self._now.is_set():
            for node in self._nodes:
                over = node.ended
                node.poll()
                if over and first is None:
                    first = node
                    on_purpose = node.exit_code in _ON_PURPOSE
                    deadline = time.monotonic() + (_SAME_END_SECONDS if on_purpose else _FAILED_SECONDS)
            if self._stop.is_set() and not told:
                told = True
                for node in self._nodes:
                    node.stop()
            time.sleep(_POLL_SECONDS)
        for node in self._nodes:
            node.poll()
        lost = not end_nodes(self._nodes)
        return self._end(first or self._nodes[0], lost)

    def _end(self, first: HeldNode, lost: bool) -> _End:
        code = first.exit_code
        failed = [node for node in self._nodes if node.exit_code not in (0, None)]
        if code == 0 and not failed and not lost:
            return _End("", again=False, lost=False)
        what = f"{first} was lost" if code is None else f"{first} ended with {_shown(code)}"
        again = code not in _ON_PURPOSE and not self._stop.is_set()
        if len(self._nodes) == 1 and code is not None and code >= 0:  # its launcher has restarted its workers
            again = False
        return _End(what, again, lost)

    def _saved_step(self) -> int:
        checkpoints = self._directory.checkpoints
        found = (checkpoint_step(path) for path in checkpoints.iterdir()) if checkpoints.is_dir() else ()
        return max((step for step in found if step is not None), default=0)


def _shown(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
