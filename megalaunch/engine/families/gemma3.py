"""Gemma 3's language models: norms of queries and keys, no caps, windowed layers with a rotary base of their own."""

from __future__ import annotations

from typing import Any

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.config_file import ConfigFile
from megalaunch.engine.families.family import FamilyFile, Values
from megalaunch.engine.families.gemma2 import read_gemma, write_gemma
from megalaunch.engine.families.llama import tensors
from megalaunch.engine.families.rope_keys import scaling_values, write_rope


def _read(file: ConfigFile) -> Values:
    pattern = file.integer("sliding_window_pattern", file.take("_sliding_window_pattern", 6))
    return read_gemma(file, caps=(None, None), every=pattern) | {"qk_norm": "head", "rope": _rope(file)}


def _rope(file: ConfigFile) -> dict[str, Any]:
    """Two bases: older files have them as keys, newer ones a dictionary for each kind of layer."""
    new, old = file.take("rope_parameters", None) or {}, file.take("rope_scaling", None) or {}
    far, near = new.get("full_attention") or {}, new.get("sliding_attention") or {}
    theta = far.get("rope_theta") or file.take("rope_theta", 1e6) or 1e6
    local = near.get("rope_theta") or file.take("rope_local_base_freq", 1e4) or 1e4
    if near.get("rope_type", "default") != "default":
        file.problems.append("config.json: rotary scaling in layers with a window has no counterpart here")
    return scaling_values(file, {**old, **far}, theta) | {"window_theta": float(local)}


def _write(model: ModelSpec) -> dict[str, Any]:
    local = {"rope_local_base_freq": model.rope.window_theta or model.rope.theta}
    if model.full_attention_every is not None:
        local["sliding_window_pattern"] = model.full_attention_every
    return write_gemma(model) | write_rope(model.rope) | local


FAMILY = FamilyFile("gemma3", "gemma3_text", "Gemma3ForCausalLM", _read, _write, tensors)
