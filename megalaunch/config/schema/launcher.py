"""The `launcher` section: how workers are started, watched and stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LauncherSpec:
    """torch.distributed.run's elastic agent starts the workers, here and on every cluster."""

    name: Literal["local"] = setting("local", "Where the agents are started.")
    max_restarts: int = setting(3, "Times the worker group is started again after a crash.", minimum=0)
    timeout: float = setting(600.0, "Longest time without progress, in a collective too.", "seconds", minimum=1)
    grace: float = setting(30.0, "Time from a stop signal to the end of all workers.", "seconds", minimum=1)
