"""Layout names: `tp4pp4`, `zero3dp2sp` and the like are options of the config group `parallel` without a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SHARDINGS = {"zero0": "no_shard", "zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params"}
_PART = re.compile(r"(etp|vpp|hsdp|tp|pp|cp|ep|dp)([1-9]\d{0,6})|(zero[0-3])|(sp)")
GRAMMAR = "any of tp<N> pp<N> cp<N> ep<N> etp<N> vpp<N> dp<N> hsdp<N>, sp, zero0 to zero3, written together"


class ParallelNameError(ValueError):
    """The name has the form of a layout, but sets a key twice."""


def layout_values(name: str) -> dict[str, Any] | None:
    """Return the `parallel` keys of a layout name, or None when it is not a layout name.

    >>> layout_values("tp4pp4")
    {'tp': 4, 'pp': 4}

    Raises ParallelNameError when a part is given twice (`tp2tp4`).
    """
    values: dict[str, Any] = {}
    position = 0
    while position < len(name):
        match = _PART.match(name, position)
        if match is None:
            return None
        key, value = _meaning(match)
        if key in values:
            raise ParallelNameError(f"{name!r} gives {key} twice")
        values[key] = value
        position = match.end()
    return values or None


def is_layout_name(name: str) -> bool:
    """Return True for a name that has the form of a layout, even if it sets a key twice."""
    try:
        return layout_values(name) is not None
    except ParallelNameError:
        return True


def merge_layout_names(text: str) -> str | None:
    """Return the layout name for one with separators or capitals, or None.

    >>> merge_layout_names("TP4, pp=2")
    'tp4pp2'
    """
    name = re.sub(r"[^a-z0-9]", "", text.lower())
    try:
        return name if layout_values(name) else None
    except ParallelNameError:
        return None


def _meaning(match: re.Match[str]) -> tuple[str, Any]:
    axis, degree, sharding, _ = match.groups()
    if sharding:
        return "data_sharding", _SHARDINGS[sharding]
    if axis == "hsdp":
        return "dp_replicate", int(degree)
    if axis:
        return axis, int(degree)
    return "sequence_parallel", True


def layout_name(values: Mapping[str, Any]) -> str | None:
    """Return the name that sets these `parallel` keys, or None; the inverse of `layout_values`.

    >>> layout_name({"tp": 4, "data_sharding": "optim_grads_params"})
    'tp4zero3'
    """
    names = {sharding: name for name, sharding in _SHARDINGS.items()}
    parts = []
    for key, value in values.items():
        if key in ("tp", "pp", "cp", "ep", "etp", "vpp", "dp") and isinstance(value, int):
            parts.append(f"{key}{value}")
        elif key == "dp_replicate":
            parts.append(f"hsdp{value}")
        elif key == "data_sharding" and value in names:
            parts.append(names[value])
        elif key == "sequence_parallel" and value is True:
            parts.append("sp")
        else:
            return None
    return "".join(parts) or None
