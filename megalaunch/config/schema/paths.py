"""Dotted paths into a run spec and into its plain nested data (`model.moe.num_experts`)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import reduce
from typing import Any


def value_at(spec: Any, path: str) -> Any:
    """The value of a leaf (or section) of a spec."""
    return reduce(getattr, path.split("."), spec)


def entry_at(data: Mapping[str, Any], path: str) -> Any:
    """The value at a path of nested plain data; raises KeyError where there is none."""
    return reduce(lambda level, key: level[key], path.split("."), data)


def put(data: MutableMapping[str, Any], path: str, value: Any) -> None:
    """Set the value at a path of nested plain data, making the levels above it as needed."""
    *sections, name = path.split(".")
    level = data
    for section in sections:
        level = level.setdefault(section, {})
    level[name] = value
