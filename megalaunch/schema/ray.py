"""The `launcher.ray` section: what a run asks of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class RaySpec:
    """The cluster, and the bundle of the placement group for each of `cluster.nodes`."""

    address: str | None = setting(
        None, "Address of the cluster; null: $RAY_ADDRESS, the cluster of this machine, or a new one here."
    )
    cpus_per_node: int = setting(1, "CPUs that Ray reserves on each node.", minimum=0, maximum=4096)
    device_resource: str = setting("GPU", "Name of the accelerators as a resource of Ray.")
    placement_timeout: float = setting(600.0, "Time limit until the cluster has free nodes.", "seconds", minimum=1)
    environment: tuple[str, ...] = setting(
        (), "Names of variables to copy to the nodes, with `*` for any text: [NCCL_*, HF_TOKEN]."
    )
