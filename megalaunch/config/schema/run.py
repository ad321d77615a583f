"""The `run` section: the run directory and what to do when it is not empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """A run directory belongs to one run."""

    name: str | None = setting(None, "Name of the run; null: that of the recipe.")
    directory: str | None = setting(None, "Run directory; null: runs/<run.name>.")
    resume: Literal["auto", "never", "required"] = setting(
        "auto", "Continue from the newest valid checkpoint; never: refuse a begun run; required: refuse a new one."
    )
