"""Independent tasks as the pods of an Indexed Job.

This process follows the Job, and deletes it if it is ended; or the Job lives on alone, and its last pod runs the final
command.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml

from megalaunch.fs import make_directory
from megalaunch.launchers.kubernetes import detached_pod
from megalaunch.launchers.kubernetes.kubectl import NotFoundError, read_json
from megalaunch.launchers.kubernetes.launcher import delete_job, next_name, pods_of, submit_manifest
from megalaunch.launchers.kubernetes.manifest import task_manifest
from megalaunch.launchers.kubernetes.pod_logs import copy_pod_log
from megalaunch.launchers.kubernetes.pod_task import MODULE, NUMBER, task_words
from megalaunch.launchers.kubernetes.state import Object, failing_pod, job_state, pod_exit_code, pod_index
from megalaunch.launchers.launcher import Job, JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord
from megalaunch.launchers.tasks import ATTEMPTS, FailedTask, TaskSet
from megalaunch.rundir.paths import RunDirectory

_ASK_SECONDS = 2.0
_SILENT_SECONDS = 600.0  # a cluster that does not answer for so long ends the command
_END_SECONDS = 60.0  # beyond launcher.stop_grace_period, for the pods of a deleted job


class KubernetesTasks:
    """Runs tasks in pods; they end with this process."""

    attached: Literal[True] = True

    def manifest(self, tasks: TaskSet) -> str:
        """Return the manifest of the Job, and the final command, which runs here."""
        job = _job(tasks)
        text = _manifest(job, next_name(job), len(tasks.numbers), MODULE) if tasks.numbers else ""
        return f"{text}# here, after all tasks\n# {shlex.join(['megalaunch', *tasks.final])}\n"

    def run(self, tasks: TaskSet, note: Callable[[str], None], started: Callable[[], None]) -> FailedTask | None:
        """Create the Job and wait for its end; a task whose pod is lost or killed is started once more."""
        if not tasks.numbers:
            return None
        job = _job(tasks)
        name = next_name(job)
        count = len(tasks.numbers)
        record = submit_manifest(job, f"job/{name}", _manifest(job, name, count, MODULE), count)
        try:
            note(f"{count} tasks are submitted to Kubernetes as {record.id}")
            started()
            return _Watched(tasks, record, note).failed_task()
        except BaseException:
            delete_job(record)
            _wait_for_pods(record, tasks.settings.stop_grace_period + _END_SECONDS)
            raise


class DetachedKubernetesTasks:
    """Creates a Job that lives on without this process."""

    attached: Literal[False] = False

    def manifest(self, tasks: TaskSet) -> str:
        """Return the manifest of the Job."""
        job, name = _detached(tasks)
        return _manifest(job, name, _pods(tasks), detached_pod.MODULE)

    def submit(self, tasks: TaskSet) -> JobRecord:
        """Create the Job; without tasks its only pod runs the final command."""
        job, name = _detached(tasks)
        make_directory(tasks.directory)
        make_directory(RunDirectory(tasks.directory).logs)
        make_directory(_places(tasks, name))
        text = _manifest(job, name, _pods(tasks), detached_pod.MODULE)
        return submit_manifest(job, f"job/{name}", text, len(tasks.numbers), final=True)


class _Watched:
    """A Job of this process, and what was told about its pods."""

    def __init__(self, tasks: TaskSet, record: JobRecord, note: Callable[[str], None]) -> None:
        self._tasks, self._record, self._note = tasks, record, note
        self._told: set[str] = set()
        self._complete = 0
        self._waits = ""

    def failed_task(self) -> FailedTask | None:
        """Wait for the end of the Job; return the task that failed. Raises LauncherError."""
        answered = time.monotonic()
        while True:
            try:
                found = read_json(self._record.options, "get", str(self._record.id))
                pods = pods_of(self._record)
                answered = time.monotonic()
            except NotFoundError:
                raise LauncherError(
                    f"{self._record.id} was deleted before its end", "the same command continues"
                ) from None
            except LauncherError:
                if time.monotonic() - answered > _SILENT_SECONDS:
                    raise
            else:
                status = job_state(found, pods)
                self._tell(pods, status)
                if status.phase == "ended":
                    return None if status.state != "FAILED" else self._failed(pods, status)
            time.sleep(_ASK_SECONDS)

    def _number(self, pod: Object) -> int:
        return self._tasks.numbers[pod_index(pod)]

    def _tell(self, pods: list[Object], status: JobStatus) -> None:
        """Note what has changed: pods that have ended, and why others do not start."""
        for pod in pods:
            name, phase = pod["metadata"]["name"], pod.get("status", {}).get("phase")
            if phase not in ("Succeeded", "Failed") or name in self._told:
                continue
            self._told.add(name)
            if phase == "Succeeded":
                self._complete += 1
                self._note(f"task {self._number(pod)} is complete ({self._complete} of {len(self._tasks.numbers)})")
            elif status.state != "FAILED":
                self._note(f"task {self._number(pod)} is run again: its pod {name} {_end(pod)}")
        if status.state in ("PENDING", "STARTING") and status.reason not in ("", self._waits):
            self._waits = status.reason
            self._note(f"{self._record.id}: {status}")

    def _failed(self, pods: list[Object], status: JobStatus) -> FailedTask:
        """Return the task that has failed the Job."""
        pod = failing_pod(pods)
        if pod is None:
            raise LauncherError(
                f"{self._record.id}: {status}", "`kubectl describe` shows it; run the same command again"
            )
        log = copy_pod_log(self._record.options, pod["metadata"]["name"], Path(self._record.output).parent)
        return FailedTask(self._number(pod), pod_exit_code(pod) or 0, log if log.exists() else None)


def _end(pod: Object) -> str:
    code = pod_exit_code(pod)
    return "was lost" if code is None else f"ended with exit code {code}"


def _wait_for_pods(record: JobRecord, seconds: float) -> None:
    """Wait until no pod of a deleted job is left that might still write. Raises LauncherError."""
    deadline = time.monotonic() + seconds
    while any(pod.get("status", {}).get("phase") not in ("Succeeded", "Failed") for pod in pods_of(record)):
        if time.monotonic() > deadline:
            raise LauncherError(f"pods of {record.id} have not ended", "`kubectl get pods` shows them")
        time.sleep(_ASK_SECONDS / 4)


def _job(tasks: TaskSet) -> Job:
    return tasks.job(task_words(tasks.numbers, tasks.arguments(NUMBER)))


def _detached(tasks: TaskSet) -> tuple[Job, str]:
    """Return the job of a detached set, and the name of its object."""
    plain = tasks.job(())
    name = next_name(plain)
    return replace(plain, arguments=detached_pod.detached_words(tasks, _places(tasks, name))), name


def _places(tasks: TaskSet, name: str) -> Path:
    return RunDirectory(tasks.directory).logs / f"{name}.places"


def _pods(tasks: TaskSet) -> int:
    return max(1, len(tasks.numbers))


def _manifest(job: Job, name: str, pods: int, module: str) -> str:
    return yaml.safe_dump(task_manifest(job, name, pods, ATTEMPTS, module), sort_keys=False, width=1000)
