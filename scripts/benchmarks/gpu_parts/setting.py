"""Where and how large a part measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
"""The checkout."""
WHEELS = ROOT / "build" / "gpu_wheels"
"""The packages that were carried to this machine, unless --wheels names another folder."""


class Unsupported(Exception):
    """Says why this device cannot run a case."""


@dataclass(frozen=True)
class Setting:
    """The device type ("cuda" or "cpu"), sizes for it or tiny ones, and whether torch.compile is used.

    With `profile` a step of each training case is profiled too. With `ahead` cases only fill the caches of compiled
    code, while other processes use the device: models have one layer.
    """

    device: str
    small: bool
    compile: bool
    profile: bool = False
    ahead: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as they are sent to the process of a part."""
        return asdict(self)
