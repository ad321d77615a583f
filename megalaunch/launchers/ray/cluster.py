"""Connect to a Ray cluster, and reserve nodes of it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalaunch.installation import install_command
from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.schema.ray import RaySpec

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_SECONDS = 1.0


def connect_to_ray(address: str | None) -> None:
    """Connect this process to a cluster, once. Raises LauncherError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    try:
        import ray
    except ImportError:
        raise LauncherError("ray is not installed", install_command("megalaunch[ray]")) from None
    if ray.is_initialized():
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=None)
    except Exception as error:  # Ray raises a bare one if its processes do not start in time
        raise _no_cluster(address or os.environ.get("RAY_ADDRESS"), error) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's own would end this process before the workers save


def _no_cluster(address: str | None, error: Exception) -> LauncherError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if address is not None:
        fix = "`ray status` must work: check launcher.ray.address"
        return LauncherError(f"Ray does not connect to {address}: {first}", fix)
    logs = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/session_latest/logs"
    fix = f"see raylet.err in {logs}; a busy machine may start it at a second try"
    return LauncherError(f"Ray does not start on this machine: {first}", fix)


def bundle(job: Job) -> dict[str, float]:
    """Return the resources of one node."""
    settings: RaySpec = job.settings.ray
    wanted = {"CPU": float(settings.cpus_per_node), settings.device_resource: float(job.devices_per_node)}
    return {name: count for name, count in wanted.items() if count}


def reserve_nodes(job: Job, given_up: Callable[[], bool]) -> PlacementGroup:
    """Wait until the cluster has all nodes of a job free, each on a machine of its own. Raises LauncherError."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    settings: RaySpec = job.settings.ray
    group = placement_group([bundle(job) or {"CPU": 0.01}] * job.nodes, strategy="STRICT_SPREAD")
    deadline = time.monotonic() + settings.placement_timeout
    while not group.wait(_POLL_SECONDS):
        if time.monotonic() > deadline or given_up():
            remove_placement_group(group)
            alive = sum(bool(node["Alive"]) for node in ray.nodes())
            raise LauncherError(
                f"the Ray cluster has {alive} node{'s' if alive != 1 else ''}, and not {job.nodes} with "
                f"{_shown(bundle(job))} free",
                "`ray status` shows what is used; launcher.ray.placement_timeout says how long to wait",
            )
    return group


def _shown(resources: dict[str, Any]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in resources.items()) or "no resources"
