"""The `platform` section: the chip of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class PlatformSpec:
    """Chip to plan for: a name from `megalaunch.platform.chips`; it need not be in this machine."""

    chip: str = setting("auto", "Chip whose specifications the plan uses; auto: that of this machine.")
