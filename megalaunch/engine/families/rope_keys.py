"""Rotary positions in config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` as newer files have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalaunch.config.schema.rope import RopeSpec
from megalaunch.engine.families.config_file import ConfigFile

_READ = {  # theirs: ours
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
}
_OF = {  # which of them a scaling has
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}


def read_rope(file: ConfigFile, theta: float = 10000.0) -> dict[str, Any]:
    """The rope section of a file without layers that rotate in different ways."""
    old, new = file.take("rope_scaling", None), file.take("rope_parameters", None)
    base = file.take("rope_theta", None)
    given = {**(old or {}), **(new or {})}
    return scaling_values(file, given, given.pop("rope_theta", None) or base or theta)


def scaling_values(file: ConfigFile, given: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Fields of RopeSpec from one dictionary of rotary parameters."""
    rest = dict(given)
    rest.pop("rope_theta", None)
    kind = rest.pop("rope_type", None) or rest.pop("type", None) or "default"
    rest.pop("type", None)
    values: dict[str, Any] = {"theta": float(theta)}
    if "partial_rotary_factor" in rest:
        values["fraction"] = float(rest.pop("partial_rotary_factor"))
    if kind == "default":
        return values
    if kind not in _OF:
        file.problems.append(f"config.json: rotary scaling {kind!r} has no counterpart here ({', '.join(_OF)} have)")
        return values
    values["scaling"] = kind
    for theirs in _OF[kind]:
        if rest.get(theirs) is not None:
            values[_READ[theirs]] = rest[theirs]
    if kind != "linear" and "original_positions" not in values:
        values["original_positions"] = file.take("max_position_embeddings", None)
    if kind == "yarn":
        values |= _growth(file, rest, float(values.get("factor", 1.0)))
    for left in set(rest) - set(_OF[kind]) - {"mscale", "mscale_all_dim", "attention_factor", "finetuned"}:
        file.problems.append(f"config.json: {left} of the rotary scaling has no counterpart here")
    return {key: float(value) if key in ("factor", "low_frequency_factor") else value for key, value in values.items()}


def _growth(file: ConfigFile, given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """mscale, from the pair of them or from the finished number."""
    both = given.get("mscale"), given.get("mscale_all_dim")
    if given.get("attention_factor") is not None and factor > 1:
        return {"mscale": (float(given["attention_factor"]) - 1) / (0.1 * math.log(factor))}
    if both[0] and both[1]:
        return {"mscale": float(both[0]), "mscale_all_dim": float(both[1])}
    return {}


def write_rope(rope: RopeSpec) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: what every version of transformers reads."""
    return {"rope_theta": rope.theta, "rope_scaling": write_scaling(rope)}


def write_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    """The scaling alone, null where nothing is stretched."""
    if rope.scaling == "none":
        return None
    values: dict[str, Any] = {"rope_type": rope.scaling}
    values |= {theirs: getattr(rope, _READ[theirs]) for theirs in _OF[rope.scaling]}
    if rope.scaling == "yarn" and rope.mscale_all_dim:
        values |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    elif rope.scaling == "yarn" and rope.mscale != 1 and rope.factor > 1:
        values["attention_factor"] = 0.1 * rope.mscale * math.log(rope.factor) + 1
    return values
