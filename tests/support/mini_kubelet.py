"""Run the pods of a Job or a JobSet as processes of this machine: a controller and a kubelet, in a thread.

The controller creates the pods in the cluster, and the kubelet runs what the cluster keeps of them. Each pod has a host
name and an /etc/hosts of its own, and an address of the loopback network; its container's command runs with the
variables, the working directory and the exit-code rules of the manifest. Images and volumes are ignored.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from megalaunch.process import descendants, kill_all

_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class Cluster(Protocol):
    """Where objects are: a stand-in, or a real API server."""

    def read(self, name: str) -> dict[str, Any] | None: ...
    def write(self, name: str, found: dict[str, Any]) -> dict[str, Any]: ...
    def is_deleted(self, name: str) -> bool: ...
    def remove(self, name: str) -> None: ...
    def log(self, pod: str) -> Path: ...


@dataclass
class _Pod:
    made: dict[str, Any]
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return str(self.made["metadata"]["name"])


class MiniKubelet:
    """Runs the pods of one object until it has ended or is deleted."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self._cluster, self._name, self._folder = cluster, name, folder
        self.kind, _, self._object = name.partition("/")
        self.pods: dict[int, _Pod] = {}
        self.started: list[str] = []
        self.failures: Counter[int] = Counter()
        self.pending: set[int] = set()  # the indexes for whose pods there is no node
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all pods."""
        self._ended.set()
        self._thread.join()
        for pod in self.pods.values():
            left = descendants(pod.process.pid)
            pod.process.kill()
            pod.process.wait()
            kill_all(left, 5)

    def kill(self, index: int) -> None:
        """Kill all processes of a pod, as a lost node does."""
        pod = self.pods[index]
        below = _pids_below(pod.process.pid)
        pod.process.send_signal(signal.SIGKILL)
        for pid in below:
            os.kill(pid, signal.SIGKILL)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the processes of all pods; a signal reaches them when they go on."""
        held = [pid for pod in self.pods.values() for pid in (pod.process.pid, *_pids_below(pod.process.pid))]
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in held:
                os.kill(pid, signal.SIGCONT)

    def _run(self) -> None:
        while not self._ended.is_set():
            found = self._cluster.read(self._name)
            if found is None:
                self._remove_all()
                return
            if not found.get("status", {}).get("conditions"):
                self._reconcile(found)
            self._ended.wait(0.2)

    def _remove_all(self) -> None:
        """End the pods of an object that is deleted, when the cluster deletes them too: they save first."""
        for pod in self.pods.values():
            while not (self._cluster.is_deleted(f"pod/{pod.name}") or self._ended.wait(0.1)):
                pass
            pod.process.terminate()
        for pod in self.pods.values():
            self._tell_end(pod, pod.process.wait())
            self._cluster.remove(f"pod/{pod.name}")

    def _reconcile(self, found: dict[str, Any]) -> None:
        job = found["spec"]
        if self.kind == "jobset":
            job = job["replicatedJobs"][0]["template"]["spec"]
        ended = {index: pod.process.poll() for index, pod in self.pods.items()}
        for index in range(job["completions"]):
            if index not in self.pods:
                if index in self.pending:
                    continue
                self._start(found, job, index)
            elif ended[index] == 0:
                self._tell_end(self.pods[index], 0)
            elif ended[index] is not None and not self._failed(found, job, index, int(ended[index])):
                return
        complete = [code == 0 for code in ended.values()]
        needed = job.get("successPolicy", {"rules": [{"succeededCount": job["completions"]}]})
        if complete.count(True) >= needed["rules"][0]["succeededCount"]:
            self._finish(found, "Complete" if self.kind == "job" else "Completed", "all pods have succeeded")

    def _failed(self, found: dict[str, Any], job: dict[str, Any], index: int, code: int) -> bool:
        """Apply the rules to a failed pod; False if the object has ended, or all pods start again."""
        code = 128 - code if code < 0 else code
        self._tell(self.pods[index], "Failed", code)
        rules = job["podFailurePolicy"]["rules"]
        action = next(
            (rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", ())), "Count"
        )
        counted = action == "Count"
        if self.kind == "job" and action == "FailJob":
            self._finish(found, "Failed", f"PodFailurePolicy: exit code {code}")
            return False
        if self.kind == "jobset" and action == "FailJob":
            message = f"Container node for pod default/x failed with exit code {code} matching FailJob rule at index 1"
            patterns = found["spec"]["failurePolicy"]["rules"][0]["onJobFailureMessagePatterns"]
            if not any(re.search(pattern, message) for pattern in patterns):
                self._finish(found, "Failed", message)
                return False
        self.failures[index] += counted
        failures, limit = self.failures.total(), job.get("backoffLimit")
        if "backoffLimitPerIndex" in job:
            failures, limit = self.failures[index], job["backoffLimitPerIndex"]
        elif self.kind == "jobset":
            limit = found["spec"]["failurePolicy"]["maxRestarts"]
        if counted and failures > limit:
            self._finish(found, "Failed", "BackoffLimitExceeded")
            return False
        if self.kind == "job":
            del self.pods[index]
            return True
        for pod in self.pods.values():
            pod.process.terminate()
        for pod in self.pods.values():
            pod.process.wait()
            self._cluster.remove(f"pod/{pod.name}")
        self.pods.clear()
        found["status"] = {"restarts": found.get("status", {}).get("restarts", 0) + 1}
        self._cluster.write(self._name, found)
        return False

    def _start(self, found: dict[str, Any], job: dict[str, Any], index: int) -> None:
        stem = self._object if self.kind == "job" else f"{self._object}-node-0"
        name = f"{stem}-{index}-{len(self.started):05d}"
        made = self._cluster.write(f"pod/{name}", self._pod(found, job, index, name))
        spec = made["spec"]
        (container,) = spec["containers"]
        subdomain = spec.get("subdomain", self._object)
        hosts = self._folder / "hosts"
        lines = [
            f"127.0.0.{2 + n} {stem}-{n}.{subdomain}.default.svc.cluster.local {stem}-{n}"
            for n in range(job["completions"])
        ]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "OMP_NUM_THREADS": "1",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "JOB_COMPLETION_INDEX": str(index),
        }
        for variable in container["env"]:
            environment[variable["name"]] = self._value(variable, environment, spec)
        command = [_expanded(word, environment) for word in container["command"]]
        inside = ["unshare", "--uts", "--mount", "sh", "-c", _ENTER, "sh", str(hosts), f"{stem}-{index}", *command]
        with self._cluster.log(name).open("wb") as log:
            process = subprocess.Popen(
                inside,
                cwd=container["workingDir"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pods[index] = _Pod(made, process)
        self.started.append(name)
        self._tell(self.pods[index], "Running", None)

    def _pod(self, found: dict[str, Any], job: dict[str, Any], index: int, name: str) -> dict[str, Any]:
        """Return the pod of an index, on a node of its own; it is deleted with its object."""
        label = "job-name" if self.kind == "job" else "jobset.sigs.k8s.io/jobset-name"
        owner = {key: found[key] for key in ("apiVersion", "kind")}
        owner |= {key: found["metadata"][key] for key in ("name", "uid")}
        labels = {label: self._object, "batch.kubernetes.io/job-completion-index": str(index)}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": {**job["template"]["spec"], "nodeName": f"worker-{index}"},
            "status": {"phase": "Pending"},
        }

    def _value(self, variable: dict[str, Any], environment: dict[str, str], spec: dict[str, Any]) -> str:
        """Return the value of a variable, which may be a key of a secret, or the name of the pod's node."""
        if "valueFrom" not in variable:
            return _expanded(variable.get("value", ""), environment)
        if "fieldRef" in variable["valueFrom"]:
            return str(spec[variable["valueFrom"]["fieldRef"]["fieldPath"].removeprefix("spec.")])
        place = variable["valueFrom"]["secretKeyRef"]
        secret = self._cluster.read(f"secret/{place['name']}")
        assert secret is not None
        return base64.b64decode(secret["data"][place["key"]]).decode()

    def _tell(self, pod: _Pod, phase: str, code: int | None) -> None:
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        pod.made["status"] = {"phase": phase, "containerStatuses": [{"name": "node", "state": state}]}
        self._cluster.write(f"pod/{pod.name}", pod.made)

    def _tell_end(self, pod: _Pod, code: int) -> None:
        self._tell(pod, "Failed" if code else "Succeeded", 128 - code if code < 0 else code)

    def _finish(self, found: dict[str, Any], condition: str, message: str) -> None:
        for pod in self.pods.values():
            if pod.process.poll() is None:
                pod.process.terminate()
            self._tell_end(pod, pod.process.wait())
        conditions = [{"type": condition, "status": "True", "message": message}]
        found["status"] = {**found.get("status", {}), "conditions": conditions}
        self._cluster.write(self._name, found)


def _pids_below(pid: int) -> list[int]:
    return [process.pid for process in descendants(pid)]


def _expanded(text: str, environment: dict[str, str]) -> str:
    """Expand as Kubernetes does: $(NAME) of a known variable, and $$ as one dollar sign."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else environment.get(m[2], m[0]), text)


@contextmanager
def running_pods(cluster: Cluster, name: str, folder: Path) -> Iterator[MiniKubelet]:
    """Run the pods of an object; nothing of them is left. Skipped where this user may not change host names."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("pods with host names of their own need root and unshare")
    deadline = time.monotonic() + 10
    while cluster.read(name) is None:
        assert time.monotonic() < deadline, f"{name} was not created"
        time.sleep(0.05)
    kubelet = MiniKubelet(cluster, name, folder)
    try:
        yield kubelet
    finally:
        kubelet.close()
