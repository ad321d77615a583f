"""Where and how large a part measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """The device type ("cuda" or "cpu"), sizes for it or tiny ones, and whether torch.compile is used."""

    device: str
    small: bool
    compile: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as they are sent to the process of a part."""
        return asdict(self)
