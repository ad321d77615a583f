"""Independent tasks on the hosts of launcher.ssh.hosts: each host runs one at a time, another one after a lost host."""

from __future__ import annotations

import os
import shlex
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megalaunch.launchers.attached.job import end_nodes
from megalaunch.launchers.attached.orders import copied_variables, hidden_values
from megalaunch.launchers.attached.own_record import own_record, write_attached_record
from megalaunch.launchers.attached.remote_agent import LEASE_SECONDS, NodeOrder
from megalaunch.launchers.launcher import LauncherError
from megalaunch.launchers.ssh.commands import ssh_commands
from megalaunch.launchers.ssh.connection import Connection
from megalaunch.launchers.tasks import ATTEMPTS, FailedTask, TaskSet
from megalaunch.rundir.paths import RunDirectory

_POLL_SECONDS = 0.1
_START_SECONDS = 60.0  # after the connection: Python starts, and looks for the directory


@dataclass
class _Waiting:
    """A task that waits for a host; not before a time, as a lost host may still run it."""

    number: int
    attempt: int = 1
    not_before: float = 0.0


@dataclass
class _Running:
    task: _Waiting
    connection: Connection
    deadline: float
    ordered: bool = False


class SshTasks:
    """Runs tasks on hosts by ssh; they end with this process."""

    attached: Literal[True] = True

    def manifest(self, tasks: TaskSet) -> str:
        """Return the command line of each host, the order of each task, and the final command, which runs here."""
        commands = (shlex.join(command) for command in ssh_commands(tasks.settings, tasks.settings.ssh.hosts))
        copied = copied_variables(hidden_values(os.environ), tasks.settings.ssh.environment)
        lines = ["# on each host, with one of the orders below on stdin", *commands]
        for number in tasks.numbers:
            order = _order(tasks, number, copied, "<text of this file>")
            lines += [f"# task {number}", order.to_line().decode().rstrip("\n")]
        return "\n".join([*lines, "# here, after all tasks", shlex.join(["megalaunch", *tasks.final])]) + "\n"

    def run(self, tasks: TaskSet, note: Callable[[str], None], started: Callable[[], None]) -> FailedTask | None:
        """Run all tasks on the hosts."""
        directory = RunDirectory(tasks.directory)
        count = len(tasks.settings.ssh.hosts)
        record = own_record("ssh", tasks.name, count, str(directory.task_log("*")), tasks=len(tasks.numbers))
        write_attached_record(directory, record)
        started()
        pool = _Pool(tasks, directory, note)
        try:
            return pool.run()
        finally:
            end_nodes([running.connection for running in pool.running.values()])


class _Pool:
    """Hands the tasks to free hosts, until all are done or one fails."""

    def __init__(self, tasks: TaskSet, directory: RunDirectory, note: Callable[[str], None]) -> None:
        self._tasks, self._directory, self._note = tasks, directory, note
        self._commands = ssh_commands(tasks.settings, tasks.settings.ssh.hosts)
        self._text = directory.job.read_text(encoding="utf-8")
        self._copied = copied_variables(os.environ, tasks.settings.ssh.environment)
        self._waiting = deque(_Waiting(number) for number in tasks.numbers)
        self._free = list(range(len(self._commands)))
        self._proven: set[int] = set()  # hosts that have run a task
        self._complete = 0
        self.running: dict[int, _Running] = {}

    def run(self) -> FailedTask | None:
        """Return the first task that fails; None if all have succeeded. Raises LauncherError."""
        while self._waiting or self.running:
            self._start()
            for host in list(self.running):
                failed = self._poll(host)
                if failed is not None:
                    return failed
            if not (self._free or self.running):
                raise LauncherError(
                    "all hosts were lost", "see whether `ssh HOST true` works; then run the command again"
                )
            time.sleep(_POLL_SECONDS)
        return None

    def _start(self) -> None:
        """Connect free hosts for the tasks that wait."""
        settings, now = self._tasks.settings.ssh, time.monotonic()
        for task in [task for task in self._waiting if task.not_before <= now][: len(self._free)]:
            self._waiting.remove(task)
            host = self._free.pop(0)
            log = self._directory.task_log(task.number)
            connection = Connection(host, settings.hosts[host], self._commands[host], log)
            self.running[host] = _Running(task, connection, now + settings.connect_timeout + _START_SECONDS)

    def _poll(self, host: int) -> FailedTask | None:
        """Read what a host says; return its task if it has failed.

        Raises:
            LauncherError: a host that has not run a task cannot start; one that has is lost.
        """
        running = self.running[host]
        connection, over = running.connection, running.connection.ended
        connection.poll()
        error = _start_failure(running, over)
        if error is not None and host not in self._proven:
            raise error
        if error is not None:
            return self._end(host, running, str(error))
        if "greeting" in connection.said and not running.ordered:
            connection.send(_order(self._tasks, running.task.number, self._copied, self._text))
            running.ordered = True
        if "started" in connection.said:
            self._proven.add(host)
        return self._end(host, running, f"{connection} was lost") if over else None

    def _end(self, host: int, running: _Running, lost: str) -> FailedTask | None:
        """Free the host of a task that has ended; run the task again if it or the host was lost, and say how."""
        del self.running[host]
        connection, task, code = running.connection, running.task, running.connection.exit_code
        connection.wait()
        number = task.number
        if code == 0:
            self._free.append(host)
            self._complete += 1
            of_all = f"{self._complete} of {len(self._tasks.numbers)}"
            self._note(f"task {number} is complete on {connection.host} ({of_all})")
            return None
        if code is not None:
            self._free.append(host)
        if code is not None and (code > 0 or task.attempt == ATTEMPTS):
            return FailedTask(number, code, self._directory.task_log(number))
        reason = lost if code is None else f"its process was killed by signal {-code}"
        self._note(f"task {number} is run again: {reason}")
        pause = LEASE_SECONDS if code is None else 0.0
        attempt = task.attempt + (code is not None)  # a lost host gets no further task, so that these end
        self._waiting.append(_Waiting(number, attempt, time.monotonic() + pause))
        return None


def _start_failure(running: _Running, over: bool) -> LauncherError | None:
    """Return why a host does not start its task; None if it has, or may."""
    connection = running.connection
    if "refused" in connection.said:
        fix = "type the command in a directory that all hosts share"
        return LauncherError(f"{connection} {connection.said['refused']}", fix)
    if "greeting" in connection.said and (other_code := connection.other_code()) is not None:
        return other_code
    if over and "greeting" not in connection.said:
        return connection.failure()
    if "started" not in connection.said and time.monotonic() > running.deadline:
        return LauncherError(f"{connection} does not answer", "see whether its processors are busy")
    return None


def _order(tasks: TaskSet, number: int, copied: dict[str, str], shared_text: str) -> NodeOrder:
    shared = str(RunDirectory(tasks.directory).job)
    return NodeOrder(tasks.arguments(number), copied, str(tasks.working_directory), shared, shared_text)
