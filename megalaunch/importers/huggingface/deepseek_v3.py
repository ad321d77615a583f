"""DeepSeek-V3 and R1, Moonlight: DeepSeek-V2 with sigmoid scores, a balance bias and multi-token prediction."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.deepseek_v2 import read_deepseek, read_groups, write_deepseek
from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.schema.model import ModelSpec

FP8 = "fp8"
"""`quant_method` of the published files: linear layers in fp8, with one scale a block."""


def _read(file: ConfigFile) -> Values:
    file.expect("scoring_func", "sigmoid")
    file.expect("topk_method", "noaux_tc")
    file.expect("rope_interleave", True)
    file.accept_quantization(FP8)
    depths = file.pop("num_nextn_predict_layers", 0) or 0
    shape = read_deepseek(file)
    router = {
        "score": "sigmoid",
        "normalize_top_k": file.flag("norm_topk_prob", True),
        "balance_bias": True,
        **read_groups(file, group_score_top_k=2),
    }
    return shape | {"moe": shape["moe"] | router, "mtp": {"num_layers": depths}}


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_deepseek(model) | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": model.moe.normalize_top_k,
        "num_nextn_predict_layers": model.mtp.num_layers,
    }


_DEFAULTS = {
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
FAMILY = FamilySpec(
    "deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM", _read, _write, defaults=_DEFAULTS, aliases=_ALIASES
)
