"""RoPE keys of config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` in newer files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.schema.rope import RopeSpec

FIELD_OF = {  # Hugging Face's key: field of RopeSpec
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "attention_factor": "attention_factor",
}
_SCALING_KEYS = {  # the keys of each scaling
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}
_MSCALE = {"yarn": {"mscale", "mscale_all_dim"}}
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
SCALINGS = ("linear", "llama3", "yarn")
_LENGTH = "original_max_position_embeddings"


def fields_without_effect(rope: RopeSpec) -> set[str]:
    """Return the fields of RopeSpec that only other scalings read."""
    read = {FIELD_OF[key] for key in _SCALING_KEYS.get(rope.scaling, ())}
    return (set(FIELD_OF.values()) | {"mscale", "mscale_all_dim"}) - read - _MSCALE.get(rope.scaling, set())


def read_rope(
    file: ConfigFile,
    theta: float = 10000.0,
    fraction: float | None = None,
    scalings: Sequence[str] = SCALINGS,
    original: int | None = None,
    default: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Read the rope section of a file whose layers all have the same rotary embedding.

    Args:
        file: the config.json.
        theta: the family's default base.
        fraction: the family's default fraction of a head that is rotated; None: the family rotates full heads.
        scalings: the scalings that the family supports.
        original: the family's default context length before scaling; None: that of the scaling, else
            max_position_embeddings.
        default: the family's rotary parameters for a file without any.
    """
    old, new = _mapping(file, "rope_scaling"), _mapping(file, "rope_parameters")
    base = file.number("rope_theta", None, null=None)
    if old and new and old != {key: value for key, value in new.items() if key != "rope_theta"}:
        file.problems.append("config.json: rope_scaling and rope_parameters differ")
    given = {**(old or new or default)}  # the older key wins, as in transformers
    given.setdefault("rope_theta", base or theta)
    file.pop(_LENGTH, None)  # without a scaling it has no effect
    part = given.pop("partial_rotary_factor", None)
    if part is None:
        part = file.number("partial_rotary_factor", None, null=None)
    return scaling_values(file, given, scalings, original) | _fraction(file, given, part, fraction)


def _mapping(file: ConfigFile, key: str) -> dict[str, Any]:
    value = file.pop(key, None)
    if value is not None and not isinstance(value, dict):
        file.problems.append(f"config.json: {key} is {value!r:.80}, must be an object or null")
    return value if isinstance(value, dict) else {}


def _fraction(file: ConfigFile, given: Mapping[str, Any], part: Any, default: float | None) -> dict[str, Any]:
    """Read the rotated fraction of a head; a partial one is a problem in a family without `default`."""
    if default is not None:
        return {"fraction": float(default if part is None else part)}
    if part is not None and part != 1:
        if _kind(given) == "default":
            file.notes.append(
                f"config.json: partial_rotary_factor ({part!r}) is ignored: this family rotates full heads"
            )
        else:
            file.problems.append(
                f"config.json: partial_rotary_factor {part!r} with RoPE scaling is not supported in this family"
            )
    return {}


def _kind(given: Mapping[str, Any]) -> str:
    """Return the scaling type, "default" without one."""
    kind = given.get("rope_type") or given.get("type") or "default"
    return "longrope" if kind == "su" else str(kind)  # its name in the first Phi-3 files


def scaling_values(
    file: ConfigFile, given: Mapping[str, Any], scalings: Sequence[str] = SCALINGS, original: int | None = None
) -> dict[str, Any]:
    """Convert one dict of rotary parameters (with `rope_theta`) to fields of RopeSpec."""
    rest = {key: value for key, value in given.items() if key not in ("rope_theta", "rope_type", "type")}
    kind, theta = _kind(given), given["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        file.problems.append(f"config.json: rope_theta is {theta!r}, must be a number")
        theta = 1.0
    values: dict[str, Any] = {"theta": float(theta)}
    if kind == "default":
        return values
    if kind not in scalings:
        file.problems.append(f"config.json: RoPE scaling {kind!r} is not supported; supported: {', '.join(scalings)}")
        return values
    values["scaling"] = kind
    for theirs in _SCALING_KEYS[kind]:
        if rest.get(theirs) is not None:
            values[FIELD_OF[theirs]] = rest[theirs]
        elif theirs in _REQUIRED[kind]:
            file.problems.append(f"config.json: RoPE scaling {kind} has no {theirs}")
    if kind != "linear":
        _read_lengths(file, values, original)
    if kind == "yarn":
        values |= _read_yarn(file, rest)
    for left in set(rest) - set(_SCALING_KEYS[kind]) - {"mscale", "mscale_all_dim", "finetuned"}:
        file.problems.append(f"config.json: {left} of the RoPE scaling is not supported")
    floats = ("factor", "low_frequency_factor", "attention_factor")
    return {key: float(value) if key in floats else value for key, value in values.items()}


def _read_lengths(file: ConfigFile, values: dict[str, Any], default: int | None) -> None:
    """Read the context length before scaling. transformers prefers the top-level key to the one inside the scaling."""
    longest = file.pop("max_position_embeddings", None)
    original = file.integer(_LENGTH, default, null=None)
    values["original_positions"] = original or values.get("original_positions") or longest
    if longest is None and not ("factor" in values and values["original_positions"]):
        file.problems.append("config.json has no max_position_embeddings, which its RoPE scaling needs")
    if "factor" in values or not isinstance(longest, int) or not isinstance(values["original_positions"], int):
        return
    values["factor"] = max(1.0, longest / values["original_positions"])


def _read_yarn(file: ConfigFile, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Read YaRN's values: a beta of 0 is the default; mscale needs both keys and no attention_factor."""
    values: dict[str, Any] = {}
    if "factor" not in rest:
        file.problems.append("config.json: RoPE scaling yarn has no factor")
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        if not rest.get(name):
            values[name] = default
    both = rest.get("mscale"), rest.get("mscale_all_dim")
    if rest.get("attention_factor") is None and both[0] and both[1]:
        values |= {"mscale": float(both[0]), "mscale_all_dim": float(both[1])}
    return values


def write_rope(rope: RopeSpec) -> dict[str, Any]:
    """Write `rope_theta` and `rope_scaling`, which every version of transformers reads."""
    return {"rope_theta": rope.theta, "rope_scaling": write_scaling(rope)}


def write_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    """Write the scaling; None without one."""
    if rope.scaling == "none":
        return None
    values: dict[str, Any] = {"rope_type": rope.scaling}
    values |= {theirs: getattr(rope, FIELD_OF[theirs]) for theirs in _SCALING_KEYS[rope.scaling]}
    if values.get("attention_factor", 0) is None:
        del values["attention_factor"]
        if rope.scaling == "yarn" and rope.mscale_all_dim:
            values |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        elif rope.scaling == "yarn" and rope.mscale != 1 and rope.factor > 1:
            values["attention_factor"] = 0.1 * rope.mscale * math.log(rope.factor) + 1
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
