"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.experts import expert_width, read_router, write_router
from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    window = file.integer("sliding_window", None, null=None)
    jitter = file.rate("router_jitter_noise", 0.0)
    moe = read_router(file, "num_local_experts") | {"input_jitter": jitter}
    own = {"sliding_window": window, "rope": read_rope(file, 1e6), "moe": moe}
    return read_common(file, epsilon=1e-5) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {
        "intermediate_size": expert_width(model),
        "sliding_window": model.sliding_window,
        "router_jitter_noise": model.moe.input_jitter,
    }
    return write_common(model) | own | write_router(model, "num_local_experts") | write_rope(model.rope)


_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_ALIASES = {"num_experts": "num_local_experts"}
FAMILY = FamilySpec("mixtral", "mixtral", "MixtralForCausalLM", _read, _write, defaults=_DEFAULTS, aliases=_ALIASES)
