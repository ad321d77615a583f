"""The `cluster` section: how many machines, and how many workers on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """world = nodes * devices_per_node; one worker a device."""

    nodes: int = setting(1, "Machines.", minimum=1, maximum=100_000)
    devices_per_node: int | Literal["auto"] = setting(
        "auto",
        "Devices of each machine; auto: those found here, or on a CPU what the layout needs.",
        minimum=1,
        maximum=4096,
    )
    node_bandwidth: float | None = setting(
        None, "Of one device to other machines; null: the chip's usual network.", "GB/s", minimum=0
    )
    cpu_workers: int = setting(
        2, "Workers on a machine without accelerators when the layout leaves dp open.", minimum=1, maximum=4096
    )
