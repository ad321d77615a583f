"""Qwen3 MoE: Qwen3 with experts, in all layers of published models."""

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
from megalaunch.importers.huggingface.llama import read_biases, read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    enabled, width = file.flag("use_sliding_window", False), file.integer("sliding_window", 4096, null=None)
    file.pop("max_window_layers", None)  # windows are in all layers or none
    file.expect("use_qk_norm", True)
    file.expect("shared_expert_intermediate_size", 0)
    moe = read_router(file, "num_experts", "global") | read_expert_layers(file)
    moe |= {
        "ffn_hidden_size": file.integer("moe_intermediate_size"),
        "normalize_top_k": file.flag("norm_topk_prob", False),
    }
    own = {"qk_norm": "head", "sliding_window": width if enabled else None, "rope": read_rope(file), "moe": moe}
    return read_common(file) | read_biases(file) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {
        "attention_bias": model.qkv_bias,
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "moe_intermediate_size": expert_width(model),
        "norm_topk_prob": model.moe.normalize_top_k,
    }
    experts = write_router(model, "num_experts") | write_expert_layers(model)
    return write_common(model) | own | experts | write_rope(model.rope)


_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}
_ALIASES = {"num_local_experts": "num_experts"}
FAMILY = FamilySpec(
    "qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM", _read, _write, defaults=_DEFAULTS, aliases=_ALIASES
)
