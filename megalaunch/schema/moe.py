"""The `model.moe` section: experts, their router and load balancing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
BalanceLoss = Literal["none", "batch", "sequence", "global"]
ExpertChoice = Literal["scores", "sinkhorn"]
DropPolicy = Literal["probs", "position"]
RouterDtype = Literal["fp32", "fp64", "bf16"]


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Mixture of experts instead of the dense feed-forward block."""

    num_experts: int | None = setting(None, "Routed experts per layer; null: a dense model.", minimum=1)
    top_k: int = setting(2, "Experts per token.", minimum=1)
    ffn_hidden_size: int | None = setting(
        None, "Intermediate size of one expert; null: model.ffn_hidden_size.", minimum=1
    )
    shared_ffn_hidden_size: int = setting(0, "Total intermediate size of the shared experts; 0: none.", minimum=0)
    shared_expert_gate: bool = setting(
        False, "Multiply the output of the shared experts by a sigmoid gate, as in Qwen2-MoE."
    )
    first_k_dense_replace: int = setting(0, "Number of first layers with a dense feed-forward block.", minimum=0)
    layer_freq: int = setting(1, "After the dense layers, every n-th layer has experts.", minimum=1)
    score: ScoreFunction = setting("softmax", "Score function that turns router logits into expert weights.")
    normalize_top_k: bool = setting(True, "Normalize the weights of a token's experts to a sum of 1.")
    scaling_factor: float = setting(1.0, "Factor applied to the expert weights.", minimum=0)
    router_bias: bool = setting(False, "The router projection has a bias.")
    router_dtype: RouterDtype = setting("fp32", "Dtype in which the router computes.")
    balance_bias: bool = setting(
        False, "Balance load by a bias on the expert selection, updated without a gradient (aux-loss-free)."
    )
    balance_bias_rate: float = setting(1e-3, "Change of the balance bias after each optimizer step.", minimum=0)
    num_groups: int | None = setting(None, "Number of expert groups for group-limited routing; null: none.", minimum=1)
    top_k_groups: int | None = setting(None, "Expert groups per token.", minimum=1)
    group_score_top_k: int | None = setting(
        None, "The score of a group is the sum of this many of its highest; null: top_k / top_k_groups.", minimum=1
    )
    balance_loss: BalanceLoss = setting(
        "none",
        "Auxiliary load-balancing loss: over a microbatch (batch), each sequence, or with the load of the "
        "previous step's global batch.",
    )
    balance_loss_coeff: float = setting(0.0, "Coefficient of the auxiliary loss.", minimum=0)
    z_loss_coeff: float = setting(
        0.0, "Coefficient of the router z-loss: the squared log-sum-exp of the router logits.", minimum=0
    )
    choice: ExpertChoice = setting(
        "scores",
        "What chooses a token's experts in training: its scores, or a sinkhorn assignment, in which all experts have "
        "about as many tokens of a microbatch.",
    )
    capacity_factor: float | None = setting(
        None, "Capacity of an expert: this times its even share of the tokens; null: unlimited.", minimum=0
    )
    drop_policy: DropPolicy = setting(
        "probs", "Tokens that a full expert drops: those with the lowest probability, or the last."
    )
    pad_to_capacity: bool = setting(False, "Pad the input of each expert to its capacity.")
    input_jitter: float = setting(
        0.0, "Multiplicative noise on the router's input during training.", minimum=0, maximum=1
    )
