"""Format a value of a run for people: as in YAML."""

from __future__ import annotations

from typing import Any


def to_yaml(value: Any) -> str:
    """Return `null`, `true`, `[mlp, norm]`, `0.0003`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_yaml, value))}]"
    return str(value)
