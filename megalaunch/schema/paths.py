"""Dotted paths into a run spec and into its plain nested data (`model.moe.num_experts`)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

S = TypeVar("S")


def value_at(spec: Any, path: str) -> Any:
    """Return the value of a leaf (or section) of a spec."""
    return reduce(getattr, path.split("."), spec)


def entry_at(data: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of nested plain data; raises KeyError if there is none."""
    return reduce(lambda level, key: level[key], path.split("."), data)


def put(data: MutableMapping[str, Any], path: str, value: Any) -> None:
    """Set the value at a path of nested plain data; create the levels above it as needed."""
    *sections, name = path.split(".")
    level = data
    for section in sections:
        level = level.setdefault(section, {})
    level[name] = value


def with_value(spec: S, values: Mapping[str, Any]) -> S:
    """Return the spec (or section) with some leaves replaced, without validating the values."""
    direct = {path: value for path, value in values.items() if "." not in path}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        if "." in path:
            section, _, rest = path.partition(".")
            inner.setdefault(section, {})[rest] = value
    for section, below in inner.items():
        direct[section] = with_value(getattr(spec, section), below)
    return replace(spec, **direct)  # type: ignore[type-var]
