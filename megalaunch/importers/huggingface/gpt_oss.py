"""gpt-oss: experts with biases and a clamped gate, attention sinks, a sliding window in every second layer."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.experts import expert_width, read_router, write_router
from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_biases, read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.importers.huggingface.sliding_window import read_windows, write_windows
from megalaunch.schema.model import ModelSpec

MXFP4 = "mxfp4"
"""`quant_method` of the published files: experts in blocks of 32 values of 4 bits, with one scale a block."""


_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The rotary parameters of the published models, which transformers takes for a file without any."""


def _read(file: ConfigFile) -> Values:
    file.expect("swiglu_alpha", 1.702)
    file.expect("hidden_act", "silu")
    file.ignore("experts_per_token", "transformers reads num_experts_per_tok")
    file.ignore("initial_context_length", "it repeats the original context length of the RoPE scaling")
    file.accept_quantization(MXFP4)
    moe = read_router(file, "num_local_experts") | {"balance_loss": "none", "balance_loss_coeff": 0.0}
    width = file.integer("sliding_window", 128, null=None)
    own = {
        "activation": "quick_geglu",
        "swiglu_limit": file.number("swiglu_limit", 7.0),
        "mlp_bias": True,
        "attention_sinks": True,
        "rope": read_rope(file, default=_ROPE),
        "moe": moe | {"router_bias": True},
    }
    return read_common(file, epsilon=1e-5, head_dim=64) | read_biases(file) | read_windows(file, width, every=2) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {
        "hidden_act": "silu",
        "intermediate_size": expert_width(model),
        "attention_bias": model.qkv_bias,
        "swiglu_limit": model.swiglu_limit,
    }
    shape = write_common(model) | own | write_windows(model)
    return shape | write_router(model, "num_local_experts") | write_rope(model.rope)


_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
}
_ALIASES = {"num_experts": "num_local_experts"}
FAMILY = FamilySpec("gpt_oss", "gpt_oss", "GptOssForCausalLM", _read, _write, defaults=_DEFAULTS, aliases=_ALIASES)
