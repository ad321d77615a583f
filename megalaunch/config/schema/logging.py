"""The `measure` section: what is logged, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LoggingSpec:
    """Every step is a line of metrics.jsonl; this is about what a person sees."""

    log_interval: int = setting(10, "Steps between printed lines.", "steps", minimum=1)
