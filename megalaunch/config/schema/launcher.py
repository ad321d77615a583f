"""The `launcher` section: how workers are started, watched and stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LauncherSpec:
    """torch's elastic agent starts the workers, here and on every cluster."""

    name: Literal["local"] = setting("local", "Where the agents are started.")
    max_restarts: int = setting(
        3, "Times in a row that the workers are started again after a failure; a new checkpoint refills it.", minimum=0
    )
    restart_backoff: float = setting(
        5.0,
        "Pause before the second restart in a row; it doubles with each further one, up to 300 s. The first has none.",
        "seconds",
        minimum=0,
    )
    hang_timeout: float = setting(600.0, "Longest time without progress, in a collective too.", "seconds", minimum=1)
    step_timeout: float | None = setting(
        None,
        "Longest time without progress within a step, at most launcher.hang_timeout; null: 10 x the median step, "
        "at least 15 s, or launcher.hang_timeout while that is not known and with train.compile.",
        "seconds",
        minimum=1,
    )
    start_timeout: float = setting(
        1800.0,
        "Longest time without progress from a start to the first step; launcher.hang_timeout if longer.",
        "seconds",
        minimum=1,
    )
    stop_grace_period: float = setting(30.0, "Time from a stop signal to the end of all workers.", "seconds", minimum=1)
