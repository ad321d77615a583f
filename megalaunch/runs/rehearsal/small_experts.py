"""Shrink routed experts and latent attention: few narrow experts, of which each token still leaves some out."""

from __future__ import annotations

import math
from typing import Any

from megalaunch.schema import RunSpec

_TOP_K = 4
_GROUPS, _TOP_K_GROUPS = 4, 2
_EXPERTS = 8
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def small_experts(spec: RunSpec, hidden_size: int, tp: int, ep: int) -> dict[str, Any]:
    """Return the `model.moe` keys for `tp` and `ep` ranks and a model of `hidden_size`; none for a dense model."""
    moe, model = spec.model.moe, spec.model
    if moe.num_experts is None:
        return {}
    top_k, unit = min(moe.top_k, _TOP_K), ep
    values: dict[str, Any] = {}
    if moe.num_groups is not None and moe.top_k_groups is not None:
        groups, used = min(moe.num_groups, _GROUPS), min(moe.top_k_groups, _TOP_K_GROUPS)
        top_k = used * min(_TOP_K // _TOP_K_GROUPS, max(1, moe.top_k // moe.top_k_groups))
        unit = math.lcm(ep, groups * max(2, moe.group_score_top_k or 0))
        values |= {"model.moe.num_groups": groups, "model.moe.top_k_groups": used}
    enough = min(moe.num_experts, max(_EXPERTS, 2 * top_k))
    values |= {"model.moe.num_experts": min(moe.num_experts, -(-enough // unit) * unit), "model.moe.top_k": top_k}
    if moe.ffn_hidden_size is not None:
        values["model.moe.ffn_hidden_size"] = small_ffn(moe.ffn_hidden_size, model.hidden_size, hidden_size, tp)
    if moe.shared_ffn_hidden_size:
        shared = small_ffn(moe.shared_ffn_hidden_size, model.hidden_size, hidden_size, tp)
        values["model.moe.shared_ffn_hidden_size"] = shared
    values["model.moe.first_k_dense_replace"] = min(1, moe.first_k_dense_replace)
    values["model.moe.layer_freq"] = min(2, moe.layer_freq)
    return values


def small_ffn(width: int, hidden_size: int, small_hidden_size: int, tp: int) -> int:
    """Return the inner width of a feed-forward block, in about the same ratio to the hidden size, but at most twice."""
    unit = math.lcm(8, tp)
    return max(1, round(min(2.0, width / hidden_size) * small_hidden_size / unit)) * unit


def small_latents(spec: RunSpec) -> dict[str, Any]:
    """Return the `model.mla` keys and the head dim that follows from them; none without latent attention."""
    mla = spec.model.mla
    if mla.kv_lora_rank is None:
        return {}
    values = {f"model.mla.{key}": size for key, size in _LATENT.items() if getattr(mla, key) is not None}
    return {**values, "model.head_dim": latent_head_dim()}


def latent_head_dim() -> int:
    """Return the width of a query and key head of a rehearsal with latent attention."""
    return _LATENT["qk_nope_head_dim"] + _LATENT["qk_rope_head_dim"]
