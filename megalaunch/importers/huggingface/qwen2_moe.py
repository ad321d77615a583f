"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a shared expert behind a gate."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.experts import (
    expert_width,
    read_expert_layers,
    read_router,
    write_expert_layers,
    write_router,
)
from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec

_FULL = "full_attention"


def _read(file: ConfigFile) -> Values:
    if file.flag("use_sliding_window", False) or any(kind != _FULL for kind in file.pop("layer_types", None) or []):
        file.problems.append("config.json: use_sliding_window is not supported in this family")
    for key in ("sliding_window", "max_window_layers"):
        file.pop(key, None)  # use_sliding_window is false
    moe = read_router(file, "num_experts") | read_expert_layers(file)
    moe |= {
        "ffn_hidden_size": file.integer("moe_intermediate_size"),
        "normalize_top_k": file.flag("norm_topk_prob", False),
        "shared_ffn_hidden_size": file.integer("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }
    own = {"qkv_bias": file.flag("qkv_bias", True), "rope": read_rope(file), "moe": moe}
    return read_common(file) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {
        "qkv_bias": model.qkv_bias,
        "use_sliding_window": False,
        "moe_intermediate_size": expert_width(model),
        "shared_expert_intermediate_size": model.moe.shared_ffn_hidden_size,
        "norm_topk_prob": model.moe.normalize_top_k,
    }
    experts = write_router(model, "num_experts") | write_expert_layers(model)
    return write_common(model) | own | experts | write_rope(model.rope)


_DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
FAMILY = FamilySpec("qwen2_moe", "qwen2_moe", "Qwen2MoeForCausalLM", _read, _write, defaults=_DEFAULTS)
