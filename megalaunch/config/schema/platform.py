"""The `platform` section: the kind of device a run is made for."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class PlatformSpec:
    """The chip names a row of `megalaunch.platform.chips`, readable on any machine."""

    chip: str = setting("auto", "Chip whose facts are planned with; auto: what this machine has.")
