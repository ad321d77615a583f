"""The `launcher` section: where agents start, restarts, hang detection and stopping of workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalaunch.schema.kubernetes import KubernetesSpec
from megalaunch.schema.ray import RaySpec
from megalaunch.schema.setting import setting
from megalaunch.schema.slurm import SlurmSpec
from megalaunch.schema.ssh import SshSpec


@dataclass(frozen=True, kw_only=True)
class LauncherSpec:
    """Restarts, timeouts and stopping. PyTorch's elastic agent starts the workers."""

    name: Literal["local", "slurm", "ssh", "kubernetes", "ray"] = setting(
        "local",
        "Where to start the elastic agents: on this machine, on the nodes of a job of Slurm, on hosts by ssh, "
        "in pods of Kubernetes, or on the nodes of a Ray cluster; inside an allocation always on its nodes.",
    )
    python: str | None = setting(None, "Python of the nodes; null: the path of this one, or `python3` in a container.")
    preflight: bool = setting(
        True,
        "Check the nodes of a run before the first step: devices, disks and interfaces; of several also software, "
        "network and its bandwidth, clocks, and that they share the run directory.",
    )
    max_restarts: int = setting(3, "Restarts in a row after failures; each new checkpoint resets the count.", minimum=0)
    restart_backoff: float = setting(
        5.0,
        "Delay before the second restart in a row, doubled for each further one, up to 300 s; the first has none.",
        "seconds",
        minimum=0,
    )
    hang_timeout: float = setting(600.0, "Time limit without progress, collectives included.", "seconds", minimum=1)
    step_timeout: float | None = setting(
        None,
        "Timeout without progress within a step, at most launcher.hang_timeout; null: 10 x the median step time, "
        "at least 12 s, or launcher.hang_timeout until that is known and with train.compile.",
        "seconds",
        minimum=1,
    )
    start_timeout: float = setting(
        1800.0,
        "Timeout without progress from the start to the first step, at least launcher.hang_timeout.",
        "seconds",
        minimum=1,
    )
    stop_grace_period: float = setting(
        30.0, "Time from a stop signal until the workers are killed.", "seconds", minimum=1
    )
    min_nodes: int | None = setting(
        None,
        "Continue on fewer nodes, at least these, with the same global batch, where nodes were lost or failed the "
        "preflight and none is spare; null: only on all. With launcher=ssh, slurm, ray or kubernetes.",
        "nodes",
        minimum=1,
    )
    rejoin_every: int = setting(
        1,
        "While nodes are missing (launcher.min_nodes), ask after every this many checkpoints whether they are back, "
        "then save and restart with them; 0: only at restarts.",
        "checkpoints",
        minimum=0,
    )
    enable_ft_package: bool = setting(
        False,
        "Report heartbeats and sections to the rank monitors of NVRx, where its `ft_launcher` starts the workers; "
        "needs nvidia-resiliency-ext.",
    )
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    ssh: SshSpec = field(default_factory=SshSpec)
    kubernetes: KubernetesSpec = field(default_factory=KubernetesSpec)
    ray: RaySpec = field(default_factory=RaySpec)
