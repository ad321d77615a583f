"""The `run` section: the run directory, and whether to resume from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Name and directory of the run. A run directory belongs to one run."""

    name: str | None = setting(None, "Name of the run; null: the name of the recipe.")
    directory: str | None = setting(None, "Run directory; null: runs/<run.name>.")
    resume: Literal["auto", "never", "required"] = setting(
        "auto",
        "auto: continue from the newest valid checkpoint; never: refuse an existing run; required: refuse a new one.",
    )
    storage_timeout: float = setting(
        600.0,
        "Time to wait for a run directory that cannot be written in mid-run (full, read-only, gone) before the run "
        "ends with exit code 4; 0: end at once.",
        "seconds",
        minimum=0,
    )
    hub_revisions: tuple[str, ...] = setting(
        (), "Keys given as names on the Hugging Face Hub, each `KEY=hf://ORG/NAME@COMMIT`; set when the run starts."
    )
