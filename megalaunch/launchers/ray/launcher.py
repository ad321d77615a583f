"""Runs on a Ray cluster: an actor on each node of a placement group."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from megalaunch.launchers.attached.job import NodeStarter, end_nodes, start_nodes
from megalaunch.launchers.attached.launcher import AttachedLauncher
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.node_counts import MOST_RETURNS, NodeCounts
from megalaunch.launchers.attached.orders import commands_on_fewer, copied_variables, hidden_values, node_orders
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.launchers.ray.cluster import (
    bundle,
    connect_to_ray,
    ids_of,
    live_nodes,
    release_nodes,
    reserve_nodes,
    say_waiting,
    too_few_nodes,
)
from megalaunch.launchers.ray.connection import RayNode
from megalaunch.launchers.ray.inquiry import Inquiry
from megalaunch.launchers.ray.missing_nodes import MissingNodes
from megalaunch.rundir.events import record_event
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.ray import RaySpec

_CONNECT_SECONDS = 60.0
_RELEASE_SECONDS = 20.0  # until Ray has released the nodes of the last attempt, and noticed which are lost


class RayLauncher(AttachedLauncher):
    """Starts an agent in an actor on each node; the job ends with this process."""

    name = "ray"

    def manifest(self, job: Job) -> str:
        """Return the placement group, and what each node gets."""
        copied = copied_variables(hidden_values(os.environ), job.settings.ray.environment)
        orders = node_orders(job, copied, "<address of node 0>", 0, "<text of this file>", attempt=0)
        lines = [f"# placement group: STRICT_SPREAD, {job.nodes} x {json.dumps(bundle(job))}"]
        for node, order in enumerate(orders):
            lines += [f"# node {node}", order.to_line().decode().rstrip("\n")]
        return "\n".join([*lines, *commands_on_fewer(job)]) + "\n"

    def starter(self, job: Job, shared_text: str) -> NodeStarter:
        """Return what reserves the nodes, and starts an actor on each."""
        settings: RaySpec = job.settings.ray
        connect_to_ray(settings.address)
        return _Nodes(job, settings, shared_text)


class _Nodes(NodeStarter):
    """The nodes of a placement group, which Ray chooses among those that live."""

    def __init__(self, job: Job, settings: RaySpec, shared_text: str) -> None:
        self._job, self._settings, self._shared_text = job, settings, shared_text
        self._directory = RunDirectory(job.directory)
        self._copied = copied_variables(os.environ, settings.environment)
        self._counts = NodeCounts(job.nodes, job.fewer)
        self._group: Any = None
        self._ids: list[str] = []  # of the nodes that take part, in Ray
        self._left_out: set[str] = set()  # the ids of nodes that failed; a node that joins again has another
        self._count = job.nodes
        self._missing, self._inquiry = MissingNodes(job), Inquiry()
        self._returns = Counter[str]()

    def start(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        """Reserve the nodes anew, and start an actor on each: on all nodes, or on as many as the job may have."""
        before = self._ids
        while True:
            self._release()
            self._group = self._reserve(attempt, given_up)
            self._ids = ids_of(self._group)
            try:
                nodes = self._start_on(self._job.on_nodes(len(self._ids)), attempt, given_up)
            except NodeError as error:
                if given_up() or not self.leave_out(error.nodes, str(error)):
                    raise
                record_event(self._directory, "note", message=f"it could not start: {error}")
                continue
            self._record_change(nodes, before)
            return nodes

    def leave_out(self, nodes: Sequence[int], reason: str) -> bool:
        """Take other nodes of the cluster in place of these, or fewer; return whether it has enough that live."""
        left_out = self._left_out | {self._ids[node] for node in nodes}
        if not self._counts.largest(len(live_nodes(self._job).keys() - left_out)):
            return False
        self._left_out = left_out
        return True

    def ask_lost(self) -> None:
        """Request the nodes with which the run may have more, while it has fewer than it wants."""
        if len(self._ids) < self._job.nodes:
            self._inquiry.start(partial(self._request, self._missing))

    def returned(self) -> str:
        """Return that Ray has nodes with which the run may have more."""
        from ray.exceptions import RayError

        answer = self._inquiry.take()
        with suppress(RayError):
            if not answer and self._missing.is_ready:
                self._inquiry.start(partial(self._look, self._missing))
        return answer

    def _request(self, missing: MissingNodes) -> str:
        """Request more nodes; there is no answer before Ray holds them."""
        from ray.exceptions import RayError

        more = self._counts.next_above(len(self._ids)) - len(self._ids)
        with suppress(RayError):  # the cluster does not answer now: asked again after the next checkpoint
            missing.ask(more, {*self._ids, *self._excluded()})
        return ""

    def _look(self, missing: MissingNodes) -> str:
        """Return that the nodes that Ray holds may take part; "" if one was lost, or has joined again and again."""
        from ray.exceptions import RayError

        with suppress(RayError):
            found = missing.found()
            if found and (live_nodes(self._job).keys() - self._excluded()).issuperset(found):
                return _are_free(len(found))
            missing.withdraw()
        return ""

    def _reserve(self, attempt: int, given_up: Callable[[], bool]) -> Any:
        """Reserve as many nodes as the job may have. At its start nodes may still join, before it takes fewer.

        The smallest number may have nodes that were lost again and again, rather than end the run.
        """
        is_start, timeout = attempt == 0 and not self._left_out, self._settings.placement_timeout
        deadline, excluded = time.monotonic() + timeout, self._excluded()
        release = min(_RELEASE_SECONDS, timeout)
        say = partial(self._say, attempt)
        *larger, smallest = self._counts.descending
        for count in larger:
            may_join = is_start and count == self._job.nodes
            seconds = timeout if may_join else release
            try:
                return reserve_nodes(self._job.on_nodes(count), excluded, seconds, may_join, given_up, say)
            except LauncherError:
                if given_up():
                    raise
        seconds = max(deadline - time.monotonic(), release)
        return reserve_nodes(self._job.on_nodes(smallest), self._left_out, seconds, True, given_up, say)

    def _say(self, attempt: int, text: str) -> None:
        """Tell the user of a wait: the display of the run begins with its first attempt."""
        if attempt:
            record_event(self._directory, "note", message=text)
        else:
            say_waiting(text)

    def _release(self) -> None:
        """Give all nodes back to Ray; at the end of this process Ray takes them back itself."""
        self._missing.close()
        self._missing, self._inquiry = MissingNodes(self._job), Inquiry()  # a question without an answer is forgotten
        if self._group is not None:
            release_nodes(self._group)
            self._group = None

    def _excluded(self) -> set[str]:
        """Return the ids of nodes that are not taken: that failed, or have joined and left again and again."""
        often = {node for node, address in live_nodes(self._job).items() if self._returns[address] >= MOST_RETURNS}
        return self._left_out | often.difference(self._ids)

    def _start_on(self, job: Job, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        nodes = list(_nodes(job, self._group, self._directory))
        orders = node_orders(job, self._copied, nodes[0].host, nodes[0].port, self._shared_text, attempt)
        return start_nodes(nodes, orders, _CONNECT_SECONDS, given_up)

    def _record_change(self, nodes: Sequence[HeldNode], before: Sequence[str]) -> None:
        """Record that the number of nodes has changed, and count the nodes that have joined."""
        hosts, more = [node.host for node in nodes], len(nodes) - self._count
        self._count = len(nodes)
        if more == 0:
            return
        if more > 0:
            self._returns.update(host for node, host in zip(self._ids, hosts, strict=True) if node not in before)
        reason = _are_free(more) if more > 0 else str(too_few_nodes(self._job, self._excluded()))
        wanted = self._job.nodes
        record_event(self._directory, "nodes_changed", nodes=len(nodes), wanted=wanted, hosts=hosts, reason=reason)


def _are_free(nodes: int) -> str:
    return f"Ray has {nodes} more node{'s' if nodes > 1 else ''} free"


def _nodes(job: Job, group: Any, directory: RunDirectory) -> Iterator[RayNode]:
    """Start an actor on each node, all at the same time; yield the nodes. Raises LauncherError."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from megalaunch.launchers.ray.node_actor import NodeActor

    wanted, devices = bundle(job), job.settings.ray.device_resource
    others = {name: count for name, count in wanted.items() if name not in ("CPU", "GPU")}
    actors = [
        ray.remote(NodeActor)
        .options(
            num_cpus=wanted.get("CPU", 0),
            num_gpus=wanted.get("GPU", 0) if devices == "GPU" else 0,
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        )
        .remote(job.settings.python, str(directory.node_log(node)))
        for node in range(job.nodes)
    ]
    started: list[HeldNode] = []
    try:
        for node, actor in enumerate(actors):
            started.append(ray_node := RayNode(node, actor, directory.node_log(node)))
            yield ray_node
    except BaseException:
        end_nodes(started)
        raise
