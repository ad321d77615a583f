"""OLMoE: QK norms over all heads together, and experts in every layer."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.experts import expert_width, read_router, write_router
from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_biases, read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    file.expect("clip_qkv", None)
    moe = read_router(file, "num_experts") | {"normalize_top_k": file.flag("norm_topk_prob", False)}
    own = {"qk_norm": "full", "rope": read_rope(file), "moe": moe}
    return read_common(file, epsilon=1e-5) | read_biases(file) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    shape = write_common(model)
    del shape["head_dim"]  # always hidden_size / num_attention_heads
    own = {
        "attention_bias": model.qkv_bias,
        "intermediate_size": expert_width(model),
        "norm_topk_prob": model.moe.normalize_top_k,
    }
    return shape | own | write_router(model, "num_experts") | write_rope(model.rope)


_DEFAULTS = {
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.01,
}
_ALIASES = {"num_local_experts": "num_experts"}
FAMILY = FamilySpec("olmoe", "olmoe", "OlmoeForCausalLM", _read, _write, defaults=_DEFAULTS, aliases=_ALIASES)
