"""Runs on a Ray cluster: an actor on each node of a placement group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from megalaunch.launchers.attached.job import NodeStarter, end_nodes, start_nodes
from megalaunch.launchers.attached.launcher import AttachedLauncher
from megalaunch.launchers.attached.node import HeldNode
from megalaunch.launchers.attached.orders import copied_variables, hidden_values, node_orders
from megalaunch.launchers.launcher import Job
from megalaunch.launchers.ray.cluster import bundle, connect_to_ray, reserve_nodes
from megalaunch.launchers.ray.connection import RayNode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.ray import RaySpec

_CONNECT_SECONDS = 60.0


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
        return "\n".join(lines) + "\n"

    def starter(self, job: Job, shared_text: str) -> NodeStarter:
        """Return what reserves the nodes, and starts an actor on each."""
        settings: RaySpec = job.settings.ray
        connect_to_ray(settings.address)
        return _Nodes(job, settings, shared_text)


class _Nodes(NodeStarter):
    """The nodes of a placement group, which Ray chooses among those that live."""

    def __init__(self, job: Job, settings: RaySpec, shared_text: str) -> None:
        self._job, self._shared_text = job, shared_text
        self._copied = copied_variables(os.environ, settings.environment)
        self._group: Any = None

    def start(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        """Reserve the nodes anew, and start an actor on each."""
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        self._group = reserve_nodes(self._job, given_up)
        nodes = list(_nodes(self._job, self._group, RunDirectory(self._job.directory)))
        orders = node_orders(self._job, self._copied, nodes[0].host, nodes[0].port, self._shared_text, attempt)
        return start_nodes(nodes, orders, _CONNECT_SECONDS, given_up)


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
