"""Start the nodes of a run in the pods that wait: in all, or in as many as the run may have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from megalaunch.launchers.attached.job import NodeStarter, end_nodes, start_nodes
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.node_counts import MOST_RETURNS, NodeCounts
from megalaunch.launchers.attached.orders import node_orders
from megalaunch.launchers.attached.remote_agent import LEASE_SECONDS
from megalaunch.launchers.kubernetes.pod_channel import Pod
from megalaunch.launchers.kubernetes.pod_node import PodNode
from megalaunch.launchers.kubernetes.waiting_pods import WaitingPods
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

_ALL_SECONDS = 300.0  # at the first start, for all pods; their nodes may load the image at different speeds
_AGAIN_SECONDS = 5.0  # at a restart, for the pods that ran and for new ones in the places of others
_ENOUGH_SECONDS = 600.0  # for as many as the run needs
_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.1


class PodStarter(NodeStarter):
    """Chooses the pods of each attempt; nodes have their ranks in the order of the pods' indexes.

    Args:
        port: the first of two on node 0.
        continues: another pod has held the run, so that pods of it may run until their leases are over.
        given_up: whether this pod was told to end.
    """

    def __init__(self, job: Job, pods: WaitingPods, port: int, continues: bool, given_up: Callable[[], bool]) -> None:
        self._job, self._pods, self._port = job, pods, port
        self._continues, self._given_up = continues, given_up
        self._directory = RunDirectory(job.directory)
        self._counts = NodeCounts(job.nodes, job.fewer)
        self._chosen: list[Pod] = []
        self._nodes: list[PodNode] = []
        self._left_out: set[str] = set()  # names of nodes that failed
        self._returns = Counter[str]()
        self._asked, self._why_fewer = False, ""
        self._count = _recorded_count(self._directory) or job.nodes

    def start(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        """Wait for the pods, and start a node in each that takes part."""

        def over() -> bool:
            return self._given_up() or given_up()

        before = self._chosen
        while True:
            self._chosen, self._asked = self._choose(attempt == 0 and not before, over), False
            try:
                nodes = self._start_on(self._chosen, attempt + self._continues, over)
            except NodeError as error:
                if over() or not self.leave_out(error.nodes, str(error)):
                    raise
                record_event(self._directory, "note", message=f"it could not start: {error}")
                continue
            self._record_change(before)
            return nodes

    def leave_out(self, nodes: Sequence[int], reason: str) -> bool:
        """Leave out the Kubernetes nodes of these; return whether enough pods are left on others."""
        names = self._left_out | {self._chosen[node].node for node in nodes}
        left = {pod.index for pod in (*self._chosen, *self._available()) if pod.node not in names}
        if not self._counts.largest(len(left)):
            return False
        self._left_out, self._why_fewer = names, reason
        return True

    def ask_lost(self) -> None:
        """Look from now on for pods with which the run may have more nodes."""
        self._asked = len(self._chosen) < self._job.nodes

    def returned(self) -> str:
        """Return that pods wait with which the run has more nodes, or which pods were told to end."""
        leaving = [pod for pod, node in zip(self._chosen, self._nodes, strict=True) if node.leaves]
        if leaving:
            return f"{_named(leaving)} told to end"
        if not self._asked:
            return ""
        back = [pod for pod in self._available() if self._returns[pod.node] < MOST_RETURNS]
        grows = self._counts.largest(len(self._chosen) + len(back)) > len(self._chosen)
        return f"{_named(back)} back" if grows else ""

    def _available(self) -> list[Pod]:
        return [pod for pod in self._pods.pods() if pod.node not in self._left_out]

    def _choose(self, is_start: bool, over: Callable[[], bool]) -> list[Pod]:
        """Wait for all pods, for a time, then for enough. Raises LauncherError."""
        wait = LEASE_SECONDS if self._continues else _ALL_SECONDS
        began, wait = time.monotonic(), wait if is_start else _AGAIN_SECONDS
        while True:
            pods, waited = self._available(), time.monotonic() - began
            if over():
                raise LauncherError("stopped before the pods started")
            count = self._counts.largest(len(pods))
            if count == self._job.nodes or (count and waited > wait):
                return pods[:count]
            if waited > _ENOUGH_SECONDS:
                needed = self._counts.descending[-1]
                raise LauncherError(
                    f"{len(pods)} of {self._job.nodes} pods can take part, and the run needs {needed}",
                    "`kubectl get pods` shows why the others do not start",
                )
            time.sleep(_POLL_SECONDS)

    def _start_on(self, pods: Sequence[Pod], attempt: int, over: Callable[[], bool]) -> list[HeldNode]:
        self._nodes = []
        for node, pod in enumerate(pods):
            connection = self._pods.take(pod)
            if connection is None:
                end_nodes(self._nodes)
                raise NodeError(f"node {node} ({pod.node}) did not start: its pod has ended", "", (node,))
            self._nodes.append(PodNode(node, pod, connection))
        lock = self._directory.host_lock
        job, text = self._job.on_nodes(len(pods)), lock.read_text(encoding="utf-8")
        orders = node_orders(job, {}, pods[0].address, self._port, text, attempt, lock)
        return start_nodes(self._nodes, orders, _CONNECT_SECONDS, over)

    def _record_change(self, before: Sequence[Pod]) -> None:
        """Record that the number of nodes has changed, and count the nodes that have come back."""
        more = len(self._chosen) - self._count
        self._count = len(self._chosen)
        why_fewer, self._why_fewer = self._why_fewer, ""
        if more == 0:
            return
        if more > 0:
            new = [pod for pod in self._chosen if pod not in before]
            self._returns.update(pod.node for pod in new)
            reason = f"{_named(new)} back"
        else:
            reason = why_fewer or _missing(self._job.nodes, self._chosen)
        hosts, wanted = [pod.node for pod in self._chosen], self._job.nodes
        record_event(self._directory, "nodes_changed", nodes=len(hosts), wanted=wanted, hosts=hosts, reason=reason)


def _named(pods: Sequence[Pod]) -> str:
    return _pods([pod.index for pod in pods], "on " + " and ".join(pod.node for pod in pods))


def _missing(nodes: int, pods: Sequence[Pod]) -> str:
    return f"{_pods(sorted(set(range(nodes)) - {pod.index for pod in pods}))} missing"


def _pods(indexes: Sequence[int], where: str = "") -> str:
    """Return `pod 1 (on worker-1) is`, or `pods 1 and 2 are`."""
    numbers, several = " and ".join(map(str, indexes)), len(indexes) != 1
    place = f" ({where})" if where else ""
    return f"pod{'s' if several else ''} {numbers}{place} {'are' if several else 'is'}"


def _recorded_count(directory: RunDirectory) -> int | None:
    """Return on how many nodes the run was by its last change; None: it had all."""
    changes = (event for event in read_lines(directory.events) if event.get("event") == "nodes_changed")
    return next((int(event["nodes"]) for event in reversed(list(changes))), None)
