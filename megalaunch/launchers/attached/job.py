"""Run a job on nodes that this process holds: start them together, watch them, start all again after a failure."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megalaunch.launch.supervise import RestartBudget
from megalaunch.launchers.attached.node import HeldNode, NodeError, join_errors
from megalaunch.launchers.attached.remote_agent import LEASE_SECONDS, NodeOrder
from megalaunch.launchers.launcher import Job, JobStatus, LauncherError
from megalaunch.launchers.slow_nodes import slow_nodes
from megalaunch.rundir.checkpoint.listing import newest_step
from megalaunch.rundir.events import record_event
from megalaunch.rundir.outcome import (
    FAILED_NODES,
    NOT_RESTARTED,
    STOPPED_BETWEEN_ATTEMPTS,
    ExitCode,
    Outcome,
    read_outcome,
    write_outcome,
)
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.tail import JsonlTail
from megalaunch.schema.launcher import LauncherSpec

_POLL_SECONDS = 0.1
_START_SECONDS = 60.0  # after the connection: Python starts, and looks for the run directory
_SAME_END_SECONDS = 60.0  # from the end of one node to that of all, if the run has ended on purpose
_FAILED_SECONDS = 5.0  # the same after a failure, so that node 0 can write why; at the start, so that all are named


def start_nodes(
    connect: Iterable[HeldNode], orders: Sequence[NodeOrder], seconds: float, given_up: Callable[[], bool]
) -> list[HeldNode]:
    """Start the command on all nodes; none is left if one refuses.

    Args:
        connect: connects to one node after the other.
        seconds: for connecting.
        given_up: whether the start has to end.

    Raises:
        NodeError: nodes cannot be started; it names all that failed within a few seconds of the first.
        LauncherError: the start was given up.
    """
    nodes: list[HeldNode] = []
    try:
        for node in connect:
            nodes.append(node)  # one by one: the next may fail
        deadline = time.monotonic() + seconds + _START_SECONDS
        _wait_for("greeting", nodes, deadline, given_up)
        _raise_all([node.other_code() for node in nodes], len(nodes))
        for node, order in zip(nodes, orders, strict=True):
            node.send(order)
        _wait_for("started", nodes, deadline, given_up)
    except BaseException:
        end_nodes(nodes)
        raise
    return nodes


def _wait_for(record: str, nodes: Sequence[HeldNode], deadline: float, given_up: Callable[[], bool]) -> None:
    """Wait until all nodes have said a record. Raises NodeError; it names all that fail within a few seconds."""
    failed: dict[int, NodeError] = {}
    while not all(record in node.said or node.node in failed for node in nodes) and time.monotonic() < deadline:
        for node in nodes:
            over = node.ended
            node.poll()
            error = start_failure(node, record, over)
            if error is not None and node.node not in failed:
                failed[node.node] = error
                deadline = min(deadline, time.monotonic() + _FAILED_SECONDS)
        if given_up():
            raise LauncherError("stopped before the nodes started")
        time.sleep(_POLL_SECONDS)
    if not failed:
        fix = "see whether its file systems and its processors are busy"
        failed = {node.node: node.error("does not answer", fix) for node in nodes if record not in node.said}
    _raise_all(failed.values(), len(nodes))


def start_failure(node: HeldNode, record: str, over: bool) -> NodeError | None:
    """Return why a node will not say a record; None if it has said it, or may."""
    if "refused" in node.said:
        fix = "type the command in a directory, and with a run.directory, that all hosts share"
        return node.error(node.said["refused"], fix)
    return node.failure() if over and record not in node.said else None


def _raise_all(errors: Iterable[NodeError | None], number_of_nodes: int) -> None:
    found = [error for error in errors if error is not None]
    if found:
        raise join_errors(found, number_of_nodes)


def end_nodes(nodes: Sequence[HeldNode]) -> bool:
    """Let all agents kill what they have started, all at the same time; return whether all have."""
    for node in nodes:
        node.end_lease()
    ended = [node.wait() for node in nodes]
    return all(ended)


@dataclass(frozen=True)
class _End:
    """How one attempt ended.

    Attributes:
        reason: what the first node to end says.
        again: whether to start again.
        lost: a host was lost; its processes may continue until their lease is over.
        failed_nodes: nodes that should not take part again: lost ones, or those that failed the preflight.
        needs_others: it can start again only without `failed_nodes`: on spare hosts in their places, or on fewer.
    """

    reason: str
    again: bool
    lost: bool
    failed_nodes: tuple[int, ...] = ()
    needs_others: bool = False


class NodeStarter(ABC):
    """Starts the nodes of a job, at the start and after failures."""

    @abstractmethod
    def start(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        """Start all nodes.

        Args:
            attempt: number of the attempt, from 0.
            given_up: whether the start has to end.

        Raises:
            LauncherError: they cannot be started.
        """

    def may_replace_stragglers(self, nodes: Sequence[int]) -> bool:
        """Return whether nodes that are slower than the others should be replaced, and can be."""
        return False

    def replace(self, nodes: Sequence[int], may_return: bool = False) -> bool:
        """Let spare hosts take the places of these nodes at the next start; return whether there are enough.

        Args:
            may_return: the hosts were lost, and may take part again once they are back.
        """
        return False

    def leave_out(self, nodes: Sequence[int], reason: str) -> bool:
        """Leave these nodes out from the next start on; return whether the job may continue on fewer."""
        return False

    def poll(self) -> None:
        """Read what hosts say that take no part; called several times a second while nodes run."""
        return

    def ask_lost(self) -> None:
        """Ask nodes that were lost whether they are back, without waiting: `returned` tells it."""
        return

    def returned(self) -> str:
        """Return why to save and start again now: with more nodes, or without one that ends; "": there is no reason."""
        return ""

    def close(self) -> None:
        """Release what the starter holds itself, after the end of all nodes."""
        return


class AttachedJob:
    """Watches the nodes in a thread, so that a display that waits does not end their leases."""

    def __init__(self, job: Job, starter: NodeStarter) -> None:
        """Start all nodes. Raises LauncherError."""
        self._starter, self._directory = starter, RunDirectory(job.directory)
        self._events = JsonlTail(self._directory.events, at_end=True)
        self._nodes = starter.start(0, lambda: False)
        self._stragglers: tuple[int, ...] = ()  # nodes that the next attempt leaves out
        self._slower = ""  # in what way
        self._returned = ""  # why the next attempt has other nodes
        settings: LauncherSpec = job.settings
        self._wanted, self._rejoin_every, self._saves = job.nodes, settings.rejoin_every, 0
        self._budget = RestartBudget(settings.max_restarts, settings.restart_backoff, self._saved_step())
        self._stop, self._now = threading.Event(), threading.Event()
        self.status = self._running(0)
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
                others = bool(end.failed_nodes) and self._starter.replace(end.failed_nodes, not end.needs_others)
                if end.needs_others and not others and not self._stop.is_set():
                    others = self._starter.leave_out(end.failed_nodes, end.reason)
                if not (end.again or (end.needs_others and others)) or self._stop.is_set():
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
        except Exception as error:  # of any kind: without an end, who waits for the job would wait for ever
            reason = f"{type(error).__name__}: {error}"
        finally:
            end_nodes(self._nodes)
            self._starter.close()
        self.status = JobStatus("ended", state, reason, self._hosts, attempt)

    def _start_again(self, attempt: int, end: _End, pause: float) -> str | None:
        """Start all nodes after a pause; return why they could not start. Nothing of the last attempt runs by then."""
        pause = max(pause, LEASE_SECONDS) if end.lost else pause
        record_event(self._directory, "restart", attempt=attempt, reason=end.reason, pause_seconds=pause)
        self.status = JobStatus("running", "RESTARTING", end.reason, self._hosts, attempt)
        if self._stop.wait(pause):
            self._record_stop()
            return end.reason
        with contextlib.suppress(FileNotFoundError):
            self._directory.outcome.unlink()  # it is that of the attempt that failed
        try:
            self._nodes = self._starter.start(attempt, self._stop.is_set)
        except LauncherError as error:
            return str(error)
        self.status = self._running(attempt)
        return None

    def _record_stop(self) -> None:
        """Write the outcome of a job that is stopped while no node runs, over that of the failed attempt."""
        outcome = Outcome(int(ExitCode.PREEMPTED), STOPPED_BETWEEN_ATTEMPTS, self._saved_step())
        write_outcome(self._directory.outcome, outcome)
        record_event(self._directory, "outcome", exit_code=outcome.exit_code, reason=outcome.reason)

    def _running(self, attempt: int) -> JobStatus:
        count = len(self._nodes)
        fewer = f"{count} of {self._wanted} nodes" if count < self._wanted else ""
        return JobStatus("running", "RUNNING", fewer, self._hosts, attempt)

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
                    on_purpose = node.exit_code in NOT_RESTARTED
                    deadline = time.monotonic() + (_SAME_END_SECONDS if on_purpose else _FAILED_SECONDS)
            self._read_events()
            self._starter.poll()
            self._returned = self._returned or self._starter.returned()
            if (self._stop.is_set() or self._stragglers or self._returned) and not told:
                told = True
                for node in self._nodes:
                    node.stop()
            time.sleep(_POLL_SECONDS)
        for node in self._nodes:
            node.poll()
        lost = not end_nodes(self._nodes)
        return self._end(first or self._nodes[0], lost)

    def _read_events(self) -> None:
        """Look for stragglers in the new events, and after every `launcher.rejoin_every` checkpoints for lost nodes."""
        for event in self._events.read_new()[0]:
            if event.get("event") == "checkpoint" and self._rejoin_every:
                self._saves += 1
                if self._saves % self._rejoin_every == 0:
                    self._starter.ask_lost()
            nodes, slower = slow_nodes(event)
            if nodes and not self._stragglers and self._starter.may_replace_stragglers(nodes):
                self._stragglers, self._slower = nodes, slower

    def _end(self, first: HeldNode, lost: bool) -> _End:
        stuck = next((node for node in self._nodes if node.exit_code == ExitCode.NO_PROGRESS), None)
        first = stuck or first  # node 0 knows the failures of earlier attempts
        code = first.exit_code
        slow, self._stragglers = self._stragglers, ()
        returned, self._returned = self._returned, ""
        failed = [node for node in self._nodes if node.exit_code not in (0, None)]
        if code == 0 and not failed and not lost:
            return _End("", again=False, lost=False)
        if code is None:
            return _End(f"{first} was lost", not self._stop.is_set(), lost, failed_nodes=(first.node,))
        if slow and code == ExitCode.PREEMPTED and not self._stop.is_set():
            names = " and ".join(str(node) for node in self._nodes if node.node in slow)
            return _End(f"{names} {self._slower}", False, lost, slow, needs_others=True)
        if returned and code == ExitCode.PREEMPTED and not self._stop.is_set():
            return _End(returned, again=True, lost=lost)
        what = f"{first} ended with {_shown(code)}"
        if code == ExitCode.CONFIGURATION and (outcome := read_outcome(self._directory.outcome)) is not None:
            refused = tuple(outcome.details.get(FAILED_NODES, ()))
            return _End(outcome.reason if refused else what, False, lost, refused, needs_others=bool(refused))
        again = code not in NOT_RESTARTED and not self._stop.is_set()
        if len(self._nodes) == 1 and code >= 0:  # its launcher has restarted its workers
            again = False
        return _End(what, again, lost)

    @property
    def _hosts(self) -> str:
        return ",".join(node.host for node in self._nodes)

    def _saved_step(self) -> int:
        return newest_step(self._directory.checkpoints)


def _shown(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
