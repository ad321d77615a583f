"""Read the state of a job from its object and its pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megalaunch.launchers.kubernetes.manifest import FINAL_CODES
from megalaunch.launchers.launcher import JobStatus

SELECTORS = {
    "job": "job-name={}",
    "jobset": "jobset.sigs.k8s.io/jobset-name={}",
    "trainjob": "jobset.sigs.k8s.io/jobset-name={}",  # its controller creates a JobSet of the same name
}
"""The label by which the pods of an object are found."""

_INDEX = "batch.kubernetes.io/job-completion-index"
_ENDED = ("Complete", "Completed")
_LONGEST_REASON = 200  # characters; a scheduler lists every reason of every node

Object = dict[str, Any]


def job_state(found: Object, pods: Sequence[Object], tasks: int = 0) -> JobStatus:
    """Return the state of an object: from its conditions, and before it has ended from its pods.

    Args:
        tasks: number of independent tasks, of which the running ones count those that are complete; 0: nodes of a run.
    """
    status, may_have_fewer = found.get("status", {}), "successPolicy" in found.get("spec", {})
    conditions = {one["type"]: one for one in status.get("conditions", []) if one.get("status") == "True"}
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    shown = running if may_have_fewer and running else pods
    nodes = ",".join(dict.fromkeys(pod["spec"]["nodeName"] for pod in shown if pod.get("spec", {}).get("nodeName")))
    restarts = int(status.get("restarts", 0) or status.get("failed", 0) or 0)
    if any(name in conditions for name in _ENDED):
        return JobStatus("ended", "COMPLETE", "", nodes, restarts, exit_code=0)
    if "Failed" in conditions:
        reason = _text(conditions["Failed"])
        code = pod_exit_code(failing_pod(pods) or {}) if tasks or may_have_fewer else _exit_code(pods)
        return JobStatus("ended", "FAILED", reason, nodes, restarts, exit_code=code)
    if "Suspended" in conditions:
        return JobStatus("pending", "SUSPENDED", _text(conditions["Suspended"]), restarts=restarts)
    waiting = next((text for text in map(_waiting, pods) if text is not None), None)
    if running and may_have_fewer:
        count, wanted = len(running), int(found["spec"]["completions"])
        return JobStatus("running", "RUNNING", f"{count} of {wanted} pods" if count < wanted else "", nodes, restarts)
    if running and waiting is None:
        complete = f"{int(status.get('succeeded', 0) or 0)} of {tasks} tasks complete" if tasks else ""
        return JobStatus("running", "RUNNING", complete, nodes, restarts)
    if running or restarts:
        return JobStatus("running", "STARTING", waiting or "", nodes, restarts)
    return JobStatus("pending", "PENDING", waiting or "", nodes, restarts)


def _text(condition: Object) -> str:
    parts = (condition.get("reason", ""), condition.get("message", ""))
    return ": ".join(part for part in parts if part)[:_LONGEST_REASON]


def _waiting(pod: Object) -> str | None:
    """Return why a pending pod does not start; None for another pod."""
    status = pod.get("status", {})
    if status.get("phase") != "Pending":
        return None
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            return _text(waiting)
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _text(condition)
    return ""


def sorted_pods(pods: Sequence[Object]) -> list[Object]:
    """Return pods in the order of their nodes; of one node, in that of their creation."""
    return sorted(pods, key=lambda pod: (pod_index(pod), pod["metadata"].get("creationTimestamp", "")))


def pod_index(pod: Object) -> int:
    """Return the rank of the node that a pod is."""
    labels = {**pod["metadata"].get("annotations", {}), **pod["metadata"].get("labels", {})}
    return int(labels.get(_INDEX, 0))


def _exit_code(pods: Sequence[Object]) -> int | None:
    """Return the exit code of the newest pod of node 0 that has ended; None without one."""
    codes = [pod_exit_code(pod) for pod in sorted_pods(pods) if pod_index(pod) == 0]
    return next((code for code in reversed(codes) if code is not None), None)


def failing_pod(pods: Sequence[Object]) -> Object | None:
    """Return the pod that has failed a set of tasks: by an exit code that is no reason to repeat it, or most often."""
    failed = [pod for pod in pods if pod_exit_code(pod)]
    attempts = Counter(map(pod_index, failed))
    return min(failed, key=lambda pod: (pod_exit_code(pod) not in FINAL_CODES, -attempts[pod_index(pod)]), default=None)


def pod_exit_code(pod: Object) -> int | None:
    """Return the exit code of a pod's container; None if it has not ended, or the cluster does not tell it."""
    for container in pod.get("status", {}).get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated")
        if ended:
            return int(ended["exitCode"])
    return None
