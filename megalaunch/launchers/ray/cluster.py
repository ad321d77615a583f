"""Connect to a Ray cluster, and reserve nodes of it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalaunch.installation import install_command
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.schema.ray import RaySpec

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_SECONDS = 1.0
_QUIET_SECONDS = 3.0  # of a wait, before the user is told of it


def connect_to_ray(address: str | None) -> None:
    """Connect this process to a cluster, once. Raises LauncherError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    try:
        import ray
    except ImportError:
        raise LauncherError("ray is not installed", install_command("megalaunch[ray]")) from None
    if ray.is_initialized():
        return
    where = address or os.environ.get("RAY_ADDRESS")
    waiting = f"waiting for the Ray cluster at {where}" if where else "waiting for Ray to start on this machine"
    slow = threading.Timer(_QUIET_SECONDS, say_waiting, [waiting])
    slow.daemon = True
    slow.start()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=None)
    except Exception as error:  # Ray raises a bare one if its processes do not start in time
        raise _no_cluster(where, error) from error
    finally:
        slow.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's own would end this process before the workers save


def say_waiting(text: str) -> None:
    """Tell the user of a wait while no display shows the run."""
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()


def _no_cluster(address: str | None, error: Exception) -> LauncherError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if address is not None:
        fix = "`ray status` must work: check launcher.ray.address"
        return LauncherError(f"Ray does not connect to {address}: {first}", fix)
    logs = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/session_latest/logs"
    fix = f"see raylet.err in {logs}; a busy machine may start it at a second try"
    return LauncherError(f"Ray does not start on this machine: {first}", fix)


def error_reason(error: Exception) -> str:
    """Return the line of an error of Ray that gives its reason: the last, as the others may be a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def bundle(job: Job) -> dict[str, float]:
    """Return the resources of one node."""
    settings: RaySpec = job.settings.ray
    wanted = {"CPU": float(settings.cpus_per_node), settings.device_resource: float(job.devices_per_node)}
    return {name: count for name, count in wanted.items() if count}


def live_nodes(job: Job) -> dict[str, str]:
    """Return the address of each live node that is large enough for a node of the job, by its id in Ray."""
    import ray

    wanted = bundle(job)
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(name, 0) >= count for name, count in wanted.items())
    }


def request_nodes(job: Job, without: Collection[str]) -> PlacementGroup:
    """Request all nodes of a job, each on a machine of its own; nothing waits for them.

    Args:
        without: the ids of nodes of Ray that are not taken.
    """
    from ray.util.placement_group import placement_group

    selector = {"ray.io/node-id": f"!in({','.join(sorted(without))})"} if without else {}
    return placement_group(
        [bundle(job) or {"CPU": 0.01}] * job.nodes,
        strategy="STRICT_SPREAD",
        bundle_label_selector=[selector] * job.nodes,
    )


def reserve_nodes(
    job: Job,
    without: Collection[str],
    seconds: float,
    may_join: bool,
    given_up: Callable[[], bool],
    say: Callable[[str], None],
) -> PlacementGroup:
    """Wait until the cluster has all nodes of a job free, each on a machine of its own.

    Args:
        without: the ids of nodes of Ray that are not taken.
        seconds: time limit.
        may_join: wait for nodes that are not in the cluster yet too.
        given_up: whether the wait has to end.
        say: tells the user once for what the job waits.

    Raises:
        LauncherError: they are not free in time, or not in the cluster.
    """
    group = request_nodes(job, without)
    began, is_told = time.monotonic(), False
    deadline = began + seconds
    while not group.wait(min(_POLL_SECONDS, seconds)):
        if not is_told and time.monotonic() > began + min(_QUIET_SECONDS, seconds / 2):
            say(f"waiting up to {seconds:.0f} s: {too_few_nodes(job, without)}")
            is_told = True
        is_too_small = not may_join and len(live_nodes(job).keys() - without) < job.nodes
        if time.monotonic() > deadline or is_too_small or given_up():
            release_nodes(group)
            raise too_few_nodes(job, without)
    return group


def release_nodes(group: PlacementGroup) -> None:
    """Give the nodes of a request back, or withdraw it."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def ids_of(group: PlacementGroup) -> list[str]:
    """Return the ids in Ray of the nodes that were reserved, in their order."""
    from ray.util.placement_group import placement_group_table

    places = placement_group_table(group)["bundles_to_node_id"]
    return [places[node] for node in sorted(places)]


def too_few_nodes(job: Job, without: Collection[str]) -> LauncherError:
    """Return an error that says how many nodes the cluster has, and what the job asks of it."""
    import ray

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    left_out = len(alive.intersection(without))
    return LauncherError(
        f"the Ray cluster has {len(alive)} node{'s' if len(alive) != 1 else ''}, "
        f"{f'{left_out} of them left out, ' if left_out else ''}and not {job.nodes} with {_shown(bundle(job))} free",
        "`ray status` shows what is used; launcher.ray.placement_timeout says how long to wait",
    )


def _shown(resources: dict[str, Any]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in resources.items()) or "no resources"
