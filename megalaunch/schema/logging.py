"""The `logging` section."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LoggingSpec:
    """Console output. metrics.jsonl has a line for every step regardless."""

    log_interval: int = setting(10, "Steps between printed progress lines.", "steps", minimum=1)
