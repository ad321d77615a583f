"""Jobs of Kubernetes: a manifest for each, kept in the directory of the work."""

from __future__ import annotations

import atexit
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from megalaunch.fs import make_directory, write_file_atomically
from megalaunch.launchers.kubernetes.kubectl import (
    NotFoundError,
    check_manifest,
    cluster_options,
    create_objects,
    current_context,
    kubectl,
    read_json,
)
from megalaunch.launchers.kubernetes.manifest import manifest_text, object_name
from megalaunch.launchers.kubernetes.pod_logs import FollowedPod, copy_pod_log
from megalaunch.launchers.kubernetes.state import SELECTORS, Object, job_state, pod_index, sorted_pods
from megalaunch.launchers.launcher import Job, JobStatus, LauncherError
from megalaunch.launchers.record import JobRecord, read_record, write_record
from megalaunch.rundir.paths import RunDirectory

_LOOK_SECONDS = 5.0  # between two looks for a pod whose output can be followed
_AT_ONCE = "--grace-period=1"  # 0 would leave the containers to their node


class KubernetesLauncher:
    """Creates objects of Kubernetes; a job lives on without the process that created it."""

    attached = False

    def __init__(self) -> None:
        self._followed: FollowedPod | None = None
        self._looked = 0.0

    def manifest(self, job: Job) -> str:
        """Return the manifest in YAML."""
        return manifest_text(job, next_name(job))

    def submit(self, job: Job) -> JobRecord:
        """Let the server check the manifest, create its objects and write the record."""
        name, kind = next_name(job), job.settings.kubernetes.kind
        record = submit_manifest(job, f"{kind}/{name}", manifest_text(job, name))
        if kind == "job":
            _own_service(record.options, name, read_json(record.options, "get", str(record.id)))
        return record

    def status(self, record: JobRecord) -> JobStatus:
        """Ask for the object and its pods."""
        try:
            found = read_json(record.options, "get", str(record.id))
        except NotFoundError:
            return JobStatus("forgotten", "DELETED", "not known to Kubernetes any more")
        return job_state(found, pods_of(record), record.tasks)

    def stop(self, record: JobRecord, at_once: bool) -> str:
        """Delete the object; its pods get SIGTERM, and save within their grace period."""
        delete_job(record)
        if not (at_once or record.is_task_set):
            return f"job {record.id} is deleted; its pods save a checkpoint and end"
        if at_once:
            kubectl(record.options, "delete", "pods", f"--selector={_selector(record)}", _AT_ONCE, "--wait=false")
        return f"job {record.id} is deleted; its pods end"

    def output(self, record: JobRecord) -> list[Path]:
        """Copy the output of each pod to a file; return the files, also of pods that are gone."""
        folder = Path(record.output).parent
        try:
            for pod in pods_of(record):
                copy_pod_log(record.options, pod["metadata"]["name"], folder)
        except LauncherError:  # what was copied before is still there
            pass
        name = str(record.id).partition("/")[2]
        return sorted(folder.glob(f"pod_{name}-*.log"))

    def new_lines(self, record: JobRecord) -> list[str]:
        """Return what the pod of node 0 has printed since the last call."""
        if self._followed is not None and not self._followed.ended:
            return self._followed.lines()
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return []
        self._looked = time.monotonic()
        try:
            newest = _first_pod(pods_of(record))
        except LauncherError:  # `status` tells
            return []
        if newest is not None and (self._followed is None or self._followed.pod != newest):
            self._followed = FollowedPod(record.options, newest)
            atexit.register(self._followed.close)
        return []


def submit_manifest(job: Job, identity: str, text: str, tasks: int = 0, final: bool = False) -> JobRecord:
    """Let the server check a manifest, create its objects and write the record of the job.

    Args:
        identity: kind and name of the object that is the job.
        tasks: number of independent tasks; 0: the job is one command on its nodes.
        final: the object runs the final command of the tasks too.

    Raises:
        LauncherError: the cluster refuses it, or does not answer.
    """
    settings, directory = job.settings.kubernetes, RunDirectory(job.directory)
    options = cluster_options(settings)
    context = None if settings.context is not None else current_context()
    options += [] if context is None else [f"--context={context}"]
    make_directory(directory.root)
    make_directory(directory.logs)
    write_file_atomically(directory.manifest, text)
    check_manifest(options, directory.manifest)
    create_objects(options, directory.manifest)
    if settings.namespace is None:
        created = read_json(options, "get", identity)
        options.append(f"--namespace={created['metadata']['namespace']}")
    now, where, output = time.time(), socket.gethostname(), str(directory.logs / "pod_*.log")
    what = "kubernetes", identity, job.name, job.nodes
    record = JobRecord(*what, now, where, output, options=tuple(options), tasks=tasks, final=identity if final else 0)
    write_record(directory.job, record)
    return record


def delete_job(record: JobRecord) -> None:
    """Delete the object of a job, if it is still there; its pods get SIGTERM. Raises LauncherError."""
    kubectl(record.options, "delete", str(record.id), "--ignore-not-found", "--wait=false")


def next_name(job: Job) -> str:
    """Return the name of the next object for a directory: its last one ends in the number of that submission."""
    record = read_record(RunDirectory(job.directory).job)
    last = str(record.id).rpartition("-")[2] if record is not None and record.launcher == "kubernetes" else ""
    return object_name(job, int(last) + 1 if last.isdecimal() else 1)


def _own_service(options: Sequence[str], name: str, job: Object) -> None:
    """Let the service end with its job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    kubectl(options, "patch", f"service/{name}", "--type=merge", f"--patch={patch}")


def _selector(record: JobRecord) -> str:
    kind, _, name = str(record.id).partition("/")
    return SELECTORS[kind].format(name)


def pods_of(record: JobRecord) -> list[Object]:
    """Return the pods of a job in the order of their indexes. Raises LauncherError."""
    found = read_json(record.options, "get", "pods", f"--selector={_selector(record)}")
    return sorted_pods(found.get("items", []))


def _first_pod(pods: Sequence[Object]) -> str | None:
    """Return the name of the newest pod of node 0, which is that of the lowest index where one runs; None without one.

    Args:
        pods: in the order of their indexes.
    """
    running = [pod for pod in pods if _phase(pod) == "Running"]
    index = pod_index(running[0]) if running else 0
    started = [pod for pod in pods if pod_index(pod) == index and _phase(pod) not in (None, "Pending")]
    return started[-1]["metadata"]["name"] if started else None


def _phase(pod: Object) -> str | None:
    phase: str | None = pod.get("status", {}).get("phase")
    return phase
