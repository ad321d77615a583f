"""Launch on this machine: write the frozen spec, start the agent, supervise it, and leave no process behind."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalaunch.format.paths import display_path
from megalaunch.fs import append_line
from megalaunch.launch.agent import Agent
from megalaunch.launch.commands import WORKER_MODULE, agent_environment, node_commands
from megalaunch.launch.directory import RunDirectoryError, create_folders
from megalaunch.launch.lock import RunLock
from megalaunch.launch.run_state import RunState, ThroughputBasis
from megalaunch.launch.stop import StopSignals
from megalaunch.launch.supervise import Display, LaunchResult, Supervisor
from megalaunch.launch.trackers.process import trackers
from megalaunch.plan.world import resolved_world_size
from megalaunch.rundir.environment import ATTEMPT_VARIABLE
from megalaunch.rundir.events import record_event
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.spec_file import write_spec


@dataclass(frozen=True)
class Launch:
    """One launch of a resolved spec into a directory that this process has locked; `overrides` are the user's."""

    spec: RunSpec
    directory: RunDirectory
    lock: RunLock
    overrides: Sequence[str]
    scale: ThroughputBasis
    cores: int
    worker_module: str = WORKER_MODULE


def record_overrides(directory: RunDirectory, overrides: Sequence[str]) -> None:
    """Append the overrides of a launch to the run's history (overrides.txt). Raises OSError."""
    append_line(directory.overrides, f"{shlex.join(overrides)}\n".encode())


def run_locally(launch: Launch, stop: StopSignals, open_display: Callable[[RunState], Display | None]) -> LaunchResult:
    """Launch and supervise a run until it ends; call from the main thread.

    Raises:
        RunDirectoryError: the run directory cannot be written.
    """
    spec, directory = launch.spec, launch.directory
    command = node_commands(spec, directory.spec, launch.worker_module, max_restarts=0)[0]
    workers = int(spec.cluster.devices_per_node)
    view = write_run(launch, command)
    display = open_display(view)
    environment = agent_environment(os.environ, os.getpid(), workers, launch.cores)

    def start_agent(attempt: int) -> Agent:
        return Agent(command, {**environment, ATTEMPT_VARIABLE: str(attempt)}, directory.agent_log)

    stop.watching = True  # from here on a stop signal is forwarded to the workers
    try:
        with trackers(spec, directory):  # started before the agent, whose descendants are killed with it
            return Supervisor(spec, directory, launch.lock, start_agent, stop, view, display).watch()
    finally:
        if display is not None:
            display.close()


def write_run(launch: Launch, command: Sequence[str]) -> RunState:
    """Write the files of a launch into its directory, and return the state of the run.

    Args:
        command: of the agent of this node, for the record.

    Raises:
        RunDirectoryError: the run directory cannot be written.
    """
    spec, directory = launch.spec, launch.directory
    try:
        create_folders(directory)
        write_spec(spec, directory.spec)
        record_overrides(directory, launch.overrides)
        view = RunState(spec, directory, launch.scale)
        workers = resolved_world_size(spec.cluster)
        record_event(directory, "launch", overrides=list(launch.overrides), workers=workers, command=list(command))
    except OSError as error:
        is_full = error.errno == errno.ENOSPC
        fix = "free space there, or name another run.directory" if is_full else "name another run.directory"
        message = f"{display_path(error.filename or directory.root)} cannot be written ({error.strerror})"
        raise RunDirectoryError(message, fix) from error
    return view
