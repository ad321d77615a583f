"""The `cluster` section: nodes and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes and their devices: world size = nodes * devices_per_node, with one worker per device."""

    nodes: int | Literal["auto"] = setting(
        "auto",
        "Number of nodes (machines); auto: those of the allocation, else this machine, or where neither has the "
        "run's chip the fewest that hold the layout.",
        minimum=1,
        maximum=100_000,
    )
    devices_per_node: int | Literal["auto"] = setting(
        "auto",
        "Devices per node; auto: those of the allocation or of this machine, else the chip's usual number; on a CPU as "
        "many workers as the layout needs.",
        minimum=1,
        maximum=4096,
    )
    node_bandwidth: float | None = setting(
        None,
        "Network bandwidth of one device to other nodes; null: that of the chip's usual network.",
        "GB/s",
        minimum=0,
    )
    node_latency: float = setting(0.0, "Latency of a message between two nodes.", "microseconds", minimum=0)
    sites: int = setting(
        1, "Sites joined by slow links, with equally many nodes each, in the order of their ranks.", minimum=1
    )
    site_bandwidth: float | None = setting(
        None,
        "Bandwidth of all devices of a site together to other sites; null: as between its nodes.",
        "GB/s",
        minimum=0,
    )
    site_latency: float = setting(0.0, "Latency of a message between two sites.", "milliseconds", minimum=0)
    cpu_workers: int = setting(
        2, "Workers on a machine without accelerators when parallel.dp is not set.", minimum=1, maximum=4096
    )
