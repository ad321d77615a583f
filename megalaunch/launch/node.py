"""Launch one node of a run on several nodes: start this node's agent, watch it, forward stop signals to its workers.

The agents of all nodes restart their workers together. Where the launcher starts the nodes (ssh, Ray, the batch script
of Slurm) it restarts the agents, and their workers with them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from megalaunch.launch.agent import Agent
from megalaunch.launch.announcement import Announcement
from megalaunch.launch.commands import WORKER_MODULE, agent_environment, node_commands
from megalaunch.launch.failure import first_failure
from megalaunch.launch.local import Launch, write_run
from megalaunch.launch.node_watch import NodeWatch
from megalaunch.launch.run_state import RunState
from megalaunch.launch.stop import StopSignals
from megalaunch.launch.storage_monitor import StorageMonitor
from megalaunch.launch.supervise import POLL_SECONDS, Display, Drawing, LaunchResult
from megalaunch.launch.trackers.process import trackers
from megalaunch.plan.world import resolved_world_size
from megalaunch.platform.allocation import NodePlace
from megalaunch.process import descendants, send_signal, wait_for_any_end
from megalaunch.rundir.environment import ATTEMPT_VARIABLE
from megalaunch.rundir.events import record_event
from megalaunch.rundir.failed_attempts import failure_outcome
from megalaunch.rundir.fence import Fence, Superseded
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.outcome import ExitCode, Outcome, read_outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress
from megalaunch.rundir.tail import JsonlTail
from megalaunch.schema import RunSpec


class NodeAgent:
    """The agent of this node, and the watch over its workers. Its output goes to this process's.

    Attributes:
        pid: of the agent's process; None before it was started.
        was_hung: its workers were ended since they, or those of another node, hung.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        place: NodePlace,
        cores: int,
        worker_module: str = WORKER_MODULE,
    ) -> None:
        self._spec, self._directory, self._place, self._cores = spec, directory, place, cores
        first_node = f"{place.first_node}:{place.port + 1}"  # the launcher of node 0 listens on the first port
        # A launcher that counts its attempts restarts all nodes itself: the restarts are its own alone.
        restarts = 0 if ATTEMPT_VARIABLE in os.environ else None
        commands = node_commands(spec, directory.spec, worker_module, restarts, first_node=first_node)
        self.command = commands[place.rank]
        self.pid: int | None = None
        self.was_hung = False

    def run(self, stop: StopSignals, storage: StorageMonitor, poll: Callable[[], None]) -> int:
        """Run the agent until it ends; return its exit code, negative for a signal.

        Args:
            stop: the first stop signal goes to this node's workers, which save and end; a second one ends all at once.
            storage: of the run directory, which may hide the progress of the workers.
            poll: called several times a second.
        """
        workers = int(self._spec.cluster.devices_per_node)
        environment = agent_environment(os.environ, None, workers, self._cores)
        stop.watching = True
        agent = Agent(self.command, environment, None)
        self.pid = agent.process.pid
        watch = NodeWatch(self._spec, self._directory, self._place.rank, storage)
        deadline: float | None = None
        try:
            while (code := agent.poll()) is None:
                wait_for_any_end([agent.process], POLL_SECONDS)
                poll()
                watch.poll(time.monotonic())
                if not stop.count:
                    continue
                if deadline is None:
                    deadline = time.monotonic() + self._spec.launcher.stop_grace_period
                    if not self._forward(stop, agent):
                        break
                if stop.count > 1 or time.monotonic() > deadline:
                    break
        finally:
            agent.kill_tree()
        self.was_hung = watch.is_hung
        return code if code is not None else -int(stop.signal_for_workers)

    def _forward(self, stop: StopSignals, agent: Agent) -> bool:
        """Send the stop signal to this node's workers; False if there are none yet."""
        workers = int(self._spec.cluster.devices_per_node)
        first = self._place.rank * workers
        records = [read_progress(self._directory.progress(rank)) for rank in range(first, first + workers)]
        pids = {record.pid for record in records if record is not None}
        running = [process for process in descendants(agent.process.pid) if process.pid in pids]
        return sum(send_signal(process, stop.signal_for_workers) for process in running) > 0


def run_first_node(
    launch: Launch,
    agent: NodeAgent,
    announcement: Announcement,
    stop: StopSignals,
    open_display: Callable[[RunState], Display | None],
) -> LaunchResult:
    """Write the run directory, let the other nodes start, run node 0 and show the run until it ends.

    Raises:
        RunDirectoryError: the run directory cannot be written.
    """
    directory = launch.directory
    view, fence = write_run(launch, agent.command), Fence(directory.attempts)
    fence.follow()
    events = JsonlTail(directory.events, at_end=True)  # those of this launch follow, whatever the clocks say
    announcement.run_is_ready()
    display = open_display(view)
    storage = StorageMonitor(directory, launch.spec.run.storage_timeout, launch.lock.touch)
    drawing = Drawing(storage, view, display)

    def poll() -> None:
        storage.poll(time.monotonic())
        drawing.update()

    try:
        with trackers(launch.spec, directory):
            code = agent.run(stop, storage, poll)
        drawing.update()
    finally:
        if display is not None:
            display.close()
    outcome = read_outcome(directory.outcome)
    if outcome is None:
        concluded = _conclude(launch, stop, code, view.step, events)
        return LaunchResult(_record_outcome(directory, concluded, fence, agent.pid))
    return LaunchResult(replace(outcome, step=max(outcome.step, view.step)))  # an agent does not know the step


def run_other_node(spec: RunSpec, directory: RunDirectory, agent: NodeAgent, stop: StopSignals) -> ExitCode:
    """Run a node that is not the first; return its exit code: that of the run, if it has an outcome."""
    code = agent.run(stop, StorageMonitor(directory, spec.run.storage_timeout), lambda: None)
    outcome = read_outcome(directory.outcome)
    if outcome is not None and outcome.exit_code in list(ExitCode):
        return ExitCode(outcome.exit_code)
    if stop.count:
        return stop.exit_code
    if agent.was_hung:
        return ExitCode.HANG
    return ExitCode(code) if code in list(ExitCode) else ExitCode.CRASH


def _conclude(launch: Launch, stop: StopSignals, code: int, step: int, launched: JsonlTail) -> Outcome:
    """Return the outcome of a launch whose workers wrote none: it was stopped early, or a worker or agent crashed.

    Args:
        launched: the events since its start.
    """
    if stop.count:
        reason = "stopped before the workers saved; run the same command to resume from the newest checkpoint"
        return Outcome(int(stop.exit_code), reason, step)
    failed = [event for event in launched.read_new()[0] if event.get("event") == "worker_failed"]
    attempt = max([_newest_attempt(launch), *(int(event.get("attempt", 0)) for event in failed)])
    events = [event for event in failed if event.get("attempt") == attempt]
    failure = first_failure(attempt, events, {}, {}, step, agent_code=code)
    workers = int(launch.spec.cluster.devices_per_node)
    return failure_outcome(failure, read_lines(launch.directory.events), step, workers)


def _newest_attempt(launch: Launch) -> int:
    """Return the newest attempt of this launch that a worker has begun: one that is killed writes no event."""
    ranks = range(resolved_world_size(launch.spec.cluster))
    records = [read_progress(launch.directory.progress(rank)) for rank in ranks]
    return max((record.attempt for record in records if record is not None), default=0)


def _record_outcome(directory: RunDirectory, outcome: Outcome, fence: Fence, agent: int | None) -> Outcome:
    """Write an outcome, unless workers of another agent have taken over the run: their launcher writes theirs."""
    try:
        with contextlib.suppress(OSError):  # a full disk: the exit code and the report still show the outcome
            fence.follow(agent)
            with fence.hold():
                write_outcome(directory.outcome, outcome)
                record_event(directory, "outcome", exit_code=outcome.exit_code, reason=outcome.reason)
    except Superseded as superseded:
        return replace(outcome, exit_code=int(ExitCode.PREEMPTED), reason=str(superseded))
    return outcome
