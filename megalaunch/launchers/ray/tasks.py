"""Independent tasks as tasks of Ray: each runs its command on a free node, and again after a lost worker or node."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from megalaunch.launchers.attached.own_record import own_record, write_attached_record
from megalaunch.launchers.launcher import LauncherError
from megalaunch.launchers.ray.cluster import connect_to_ray, error_reason
from megalaunch.launchers.ray.run_command import run_command
from megalaunch.launchers.tasks import ATTEMPTS, FailedTask, TaskSet
from megalaunch.rundir.paths import RunDirectory

_ANSWER_SECONDS = 60.0
_CANCEL_SECONDS = 10.0


class RayTasks:
    """Runs tasks on a Ray cluster; they end with this process."""

    attached: Literal[True] = True

    def manifest(self, tasks: TaskSet) -> str:
        """Return what each task asks of Ray, and its command; then the final one, which runs here."""
        lines = [f"# tasks of Ray, each {json.dumps(_resources(tasks))}, on the cluster {_place(tasks)}"]
        lines += [shlex.join(["megalaunch", *tasks.arguments(number)]) for number in tasks.numbers]
        return "\n".join([*lines, "# here, after all tasks", shlex.join(["megalaunch", *tasks.final])]) + "\n"

    def run(self, tasks: TaskSet, note: Callable[[str], None], started: Callable[[], None]) -> FailedTask | None:
        """Let Ray run all tasks, as many at once as it has room for."""
        connect_to_ray(tasks.settings.ray.address)
        import ray

        directory = RunDirectory(tasks.directory)
        record = own_record("ray", tasks.name, 1, str(directory.task_log("*")), tasks=len(tasks.numbers))
        write_attached_record(directory, record)
        directory.tasks_stop.unlink(missing_ok=True)
        started()
        remote = ray.remote(run_command).options(max_retries=ATTEMPTS - 1, **_options(tasks))
        python, where, stop = tasks.settings.python, str(tasks.working_directory), str(directory.tasks_stop)
        complete = 0
        waiting: dict[Any, tuple[int, int]] = {}

        def start(number: int, attempt: int) -> None:
            log = str(directory.task_log(number))
            waiting[remote.remote(python, tasks.arguments(number), where, log, stop)] = number, attempt

        for number in tasks.numbers:
            start(number, 1)
        try:
            while waiting:
                with _exceptions_of_signals():
                    (done, *_), _ = ray.wait(list(waiting), num_returns=1)
                number, attempt = waiting.pop(done)
                code = _exit_code(done, number)
                if code < 0 and attempt < ATTEMPTS:
                    note(f"the process of task {number} was killed by signal {-code}, it is run again")
                    start(number, attempt + 1)
                elif code:
                    return FailedTask(number, code, directory.task_log(number))
                else:
                    complete += 1
                    note(f"task {number} is complete ({complete} of {len(tasks.numbers)})")
        finally:
            if waiting:
                directory.tasks_stop.touch()
                _end(list(waiting))
        return None


def _end(tasks: list[Any]) -> None:
    """Wait for tasks that were told to end, and cancel those that do not.

    Ray may start a task that it has cancelled, and aborts this process when such a one completes.
    """
    import ray

    _, left = ray.wait(tasks, num_returns=len(tasks), timeout=_CANCEL_SECONDS)
    for task in left:
        ray.cancel(task, force=True)
    if left:
        ray.wait(left, num_returns=len(left), timeout=_CANCEL_SECONDS)


@contextmanager
def _exceptions_of_signals() -> Iterator[None]:
    """Raise what the handler of a signal has raised within Ray's C code, which may return a value besides."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def _exit_code(done: Any, number: int) -> int:
    """Return the exit code of a task's command. Raises LauncherError if Ray could not run it."""
    import ray

    try:
        with _exceptions_of_signals():
            return int(ray.get(done, timeout=_ANSWER_SECONDS))
    except ray.exceptions.RayError as error:
        raise LauncherError(
            f"Ray did not run task {number}: {error_reason(error)}",
            "`ray status` must show nodes; run the same command again",
        ) from error


def _options(tasks: TaskSet) -> dict[str, Any]:
    """Return the options of a task for Ray."""
    wanted = _resources(tasks)
    cpus, gpus = wanted.pop("CPU", 0.0), wanted.pop("GPU", 0.0)
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": wanted}


def _resources(tasks: TaskSet) -> dict[str, float]:
    """Return the resources of one task."""
    settings = tasks.settings.ray
    wanted = {"CPU": float(settings.cpus_per_node), settings.device_resource: float(tasks.devices_per_node)}
    return {name: count for name, count in wanted.items() if count}


def _place(tasks: TaskSet) -> str:
    return tasks.settings.ray.address or "of $RAY_ADDRESS, of this machine, or a new one here"
