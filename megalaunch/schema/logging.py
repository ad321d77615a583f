"""The `logging` section: console output, trackers and profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LoggingSpec:
    """Console output, trackers and profiles. metrics.jsonl has a line for every step regardless."""

    log_interval: int = setting(10, "Steps between printed progress lines.", "steps", minimum=1)
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "opentelemetry"], ...] = setting(
        (),
        "Trackers that get the metrics (opentelemetry: spans), each by a process of its own; training never waits.",
    )
    tracker_project: str = setting("megalaunch", "Project of wandb, experiment of mlflow.")
    prometheus_textfile: str | None = setting(
        None, "File for node_exporter's textfile collector, with the newest metrics; its name ends in .prom."
    )
    prometheus_port: int | None = setting(
        None,
        "Port of the launcher's machine where Prometheus reads the newest metrics, at /metrics; null: none.",
        minimum=1024,
        maximum=65535,
    )
    prometheus_host: str = setting(
        "127.0.0.1",
        "IP address that prometheus_port is of; readers at another than the loopback interface need the run's token.",
    )
    profile: str | None = setting(
        None, "Steps to profile, as steps:FIRST-LAST or steps:N: a trace and a summary in profiles/; null: none."
    )
    profile_ranks: tuple[int, ...] = setting((0,), "Ranks that write a profile.", minimum=0)
