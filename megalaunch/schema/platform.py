"""The `platform` section: the chip of a run, and the overrides on it."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class PlatformSpec:
    """Chip to plan for, a name from `megalaunch.platform.chips` that need not be in this machine; its overrides."""

    chip: str = setting("auto", "Chip whose specifications the plan uses; auto: that of this machine.")
    overrides: tuple[str, ...] = setting(
        (),
        "What installed packages replace on the platform, each `TARGET=MODULE:NAME (PACKAGE VERSION)`; set when the "
        "run starts.",
    )
