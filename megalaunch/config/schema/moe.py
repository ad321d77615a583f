"""The `model.moe` section: experts, their router and how load is kept even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Mixture of experts in place of the dense feed-forward block; num_experts null: a dense model."""

    num_experts: int | None = setting(None, "Routed experts of a layer; null: a dense model.", minimum=1)
    top_k: int = setting(2, "Experts that see a token.", minimum=1)
    ffn_hidden_size: int | None = setting(None, "Inner width of one expert; null: model.ffn_hidden_size.", minimum=1)
    shared_ffn_hidden_size: int = setting(0, "Width of the shared experts together; 0: none.", minimum=0)
    first_k_dense_replace: int = setting(0, "First layers that keep a dense block.", minimum=0)
    layer_freq: int = setting(1, "After those, every n-th layer has experts.", minimum=1)
    score: Literal["softmax", "sigmoid"] = setting("softmax", "How router logits become weights.")
    normalize_top_k: bool = setting(True, "The weights of a token's experts sum to 1.")
    scaling_factor: float = setting(1.0, "The weights are multiplied by this.", minimum=0)
    router_bias: bool = setting(False, "The router projection has a bias.")
    router_dtype: Literal["fp32", "fp64", "bf16"] = setting("fp32", "Format of the router's arithmetic.")
    balance_bias: bool = setting(False, "A bias outside the gradient steers the choice of experts (aux-loss-free).")
    balance_bias_rate: float = setting(1e-3, "Step of that bias after each optimizer step.", minimum=0)
    num_groups: int | None = setting(None, "Groups of experts; a token may use some only; null: none.", minimum=1)
    top_k_groups: int | None = setting(None, "Groups that a token may use.", minimum=1)
    balance_loss: Literal["none", "batch", "sequence", "global"] = setting(
        "none", "Over what the auxiliary loss evens the load: a microbatch, each sequence, the whole batch."
    )
    balance_loss_coeff: float = setting(0.0, "Weight of the auxiliary loss.", minimum=0)
    z_loss_coeff: float = setting(0.0, "Weight of the squared log-sum of router logits.", minimum=0)
    capacity_factor: float | None = setting(
        None, "Tokens an expert takes: this times an even share; null: all that come.", minimum=0
    )
    drop_policy: Literal["probs", "position"] = setting("probs", "Which tokens a full expert drops: lightest or last.")
    pad_to_capacity: bool = setting(False, "Experts compute on full buffers whatever comes.")
    input_jitter: float = setting(0.0, "Noise on the router's input while training.", minimum=0, maximum=1)
