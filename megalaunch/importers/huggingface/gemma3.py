"""Gemma 3 language models: QK norms, no soft caps, a separate RoPE base for sliding-window layers."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.gemma2 import read_gemma, write_gemma
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.rope import scaling_values, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    pattern = file.integer("sliding_window_pattern", 6)
    file.ignore("attn_logit_softcapping", "Gemma 3 in transformers has no softcapping of attention scores")
    own = {"attn_logit_softcapping": None, "qk_norm": "head", "rope": _rope(file)}
    return read_gemma(file, caps=(None, None), every=pattern) | own


def _rope(file: ConfigFile) -> dict[str, Any]:
    """Read the two RoPE bases: older files have them as keys, newer files have a dict for each layer type."""
    new, old = file.pop("rope_parameters", None) or {}, file.pop("rope_scaling", None) or {}
    theta, local = file.number("rope_theta", 1e6), file.number("rope_local_base_freq", 1e4)
    if not isinstance(new, dict) or not isinstance(old, dict):
        file.problems.append("config.json: rope_parameters and rope_scaling must be objects or null")
        return {}
    if new.keys() - {"full_attention", "sliding_attention"}:
        file.problems.append("config.json: rope_parameters may only have full_attention and sliding_attention")
    full, sliding = new.get("full_attention") or {}, new.get("sliding_attention") or {}
    if sliding.get("rope_type", "default") != "default":
        file.problems.append("config.json: RoPE scaling in sliding-window layers is not supported")
    if any(part.get("partial_rotary_factor", 1) != 1 for part in (full, sliding, old)):
        file.problems.append("config.json: partial_rotary_factor is not supported in this family")
    given = {key: value for key, value in {**full, **old}.items() if key != "partial_rotary_factor"}
    window = sliding.get("rope_theta", local)
    return scaling_values(file, {"rope_theta": theta, **given}) | {"window_theta": float(window)}


def _write(model: ModelSpec) -> dict[str, Any]:
    local = {"rope_local_base_freq": model.rope.window_theta or model.rope.theta}
    if model.sliding_window_pattern is not None:
        local["sliding_window_pattern"] = model.sliding_window_pattern
    return write_gemma(model) | write_rope(model.rope) | local


# transformers' defaults: published files of 4B to 27B contain only the values that differ.
_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
FAMILY = FamilySpec(
    "gemma3", "gemma3_text", "Gemma3ForCausalLM", _read, _write, defaults=_DEFAULTS, multimodal_type="gemma3"
)
