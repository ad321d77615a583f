"""The `logging` section: console output and profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LoggingSpec:
    """Console output and profiles. metrics.jsonl has a line for every step regardless."""

    log_interval: int = setting(10, "Steps between printed progress lines.", "steps", minimum=1)
    profile: str | None = setting(
        None, "Steps to profile, as steps:FIRST-LAST or steps:N: a trace and a summary in profiles/; null: none."
    )
    profile_ranks: tuple[int, ...] = setting((0,), "Ranks that write a profile.", minimum=0)
