"""DeepSeek-V2 and V2-Lite: latent attention, shared experts, dense first layers; also the keys V3 shares with it."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.experts import expert_width
from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec

_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_deepseek(file: ConfigFile) -> Values:
    """Read the keys that V2 and V3 share."""
    file.expect("attention_bias", False)
    file.expect("moe_layer_freq", 1)
    file.ignore("ep_size", "a setting of the code in the published folder")
    for key in ("head_dim", "qk_head_dim"):
        file.pop(key, None)  # transformers derives both from the latent attention
    shape = read_common(file)
    if shape["num_query_groups"] != shape["num_attention_heads"]:
        file.problems.append("config.json: num_key_value_heads must be num_attention_heads: keys come from a latent")
    mla = {key: file.integer(key, null=None) if key == "q_lora_rank" else file.integer(key) for key in _LATENT}
    shape |= {"head_dim": (mla["qk_nope_head_dim"] or 0) + (mla["qk_rope_head_dim"] or 0) or None, "mla": mla}
    return shape | {"rope": read_rope(file), "moe": _read_experts(file)}


def _read_experts(file: ConfigFile) -> Values:
    """Read experts, shared experts, dense first layers, expert groups and the auxiliary loss."""
    width, shared = file.integer("moe_intermediate_size"), file.integer("n_shared_experts")
    coeff, sequence = file.rate("aux_loss_alpha", 0.0), file.flag("seq_aux", True)
    file.pop("output_router_logits", None)
    first = file.pop("first_k_dense_replace")
    if type(first) is not int or first < 0:
        file.problems.append(f"config.json: first_k_dense_replace is {first!r}, must be an integer from 0")
    loss = ("sequence" if sequence else "batch") if coeff else "none"
    return {
        "num_experts": file.integer("n_routed_experts"),
        "top_k": file.integer("num_experts_per_tok"),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": (width or 0) * (shared or 0),
        "first_k_dense_replace": first,
        "scaling_factor": file.number("routed_scaling_factor"),
        "balance_loss": loss,
        "balance_loss_coeff": coeff,
    }


def read_groups(file: ConfigFile, group_score_top_k: int) -> Values:
    """Read the expert groups. One group is none."""
    groups, used = file.integer("n_group"), file.integer("topk_group")
    if groups == 1:
        return {}
    return {"num_groups": groups, "top_k_groups": used, "group_score_top_k": group_score_top_k}


def write_deepseek(model: ModelSpec) -> dict[str, Any]:
    """Write the keys that V2 and V3 share."""
    shape, moe = write_common(model), model.moe
    del shape["head_dim"]
    return {
        **shape,
        "num_key_value_heads": model.num_attention_heads,
        **{key: getattr(model.mla, key) for key in _LATENT},
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": expert_width(model),
        "n_shared_experts": moe.shared_ffn_hidden_size // expert_width(model),
        "first_k_dense_replace": moe.first_k_dense_replace,
        "moe_layer_freq": 1,
        "routed_scaling_factor": moe.scaling_factor,
        "n_group": moe.num_groups or 1,
        "topk_group": moe.top_k_groups or 1,
        "aux_loss_alpha": moe.balance_loss_coeff if moe.balance_loss != "none" else 0.0,
        "seq_aux": moe.balance_loss in ("none", "sequence"),
        **write_rope(model.rope),
    }


def _read(file: ConfigFile) -> Values:
    file.expect("scoring_func", "softmax")
    file.expect("norm_topk_prob", False)  # transformers never normalizes, the published code does
    file.expect("mlp_bias", False)
    grouped = file.pop_choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    for key in () if grouped else ("n_group", "topk_group"):
        file.pop(key, None)
    shape = read_deepseek(file)
    groups = read_groups(file, group_score_top_k=1) if grouped else {}
    return shape | {"moe": shape["moe"] | {"score": "softmax", "normalize_top_k": False} | groups}


def _write(model: ModelSpec) -> dict[str, Any]:
    method = "greedy" if model.moe.num_groups is None else "group_limited_greedy"
    own = {"scoring_func": "softmax", "norm_topk_prob": False, "topk_method": method}
    return write_deepseek(model) | own


_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
}
_ALIASES = {"num_experts": "n_routed_experts"}
FAMILY = FamilySpec(
    "deepseek_v2", "deepseek_v2", "DeepseekV2ForCausalLM", _read, _write, defaults=_DEFAULTS, aliases=_ALIASES
)
