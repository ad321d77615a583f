"""The router: logits, scores, and the experts of each token with their weights.

Shapes: T tokens, H hidden, E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalaunch.engine.model.config import MoEConfig
from megalaunch.engine.model.dropout import RouterJitter
from megalaunch.engine.model.moe.balancing import ONE_RANK, Balancing, attach_loss, count_tokens, router_losses
from megalaunch.engine.model.moe.capacity import limit_to_capacity
from megalaunch.engine.model.moe.load import ExpertLoad
from megalaunch.engine.model.moe.router_linear import router_linear
from megalaunch.engine.model.moe.routing import (
    Routing,
    expert_weights,
    mask_other_groups,
    router_probability,
    score_experts,
    top_k_stable,
)
from megalaunch.engine.model.moe.sinkhorn import sinkhorn
from megalaunch.engine.param_layout import REPLICATED, local_param
from megalaunch.kernels.overridable import overridable

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@overridable
class Router(nn.Module):
    """The router: a linear layer, computed in `moe.router_dtype`. Replicated: each rank routes its own tokens.

    `expert_bias` (moe.balance_bias) is added to the scores for the choice of experts only, and has no gradient.
    `previous_load_E` (balance_loss=global) are the experts' shares of the tokens of the step before.
    `loss_scale` (fp16) multiplies the gradients of the router's losses, which are averaged over `microbatches`: those
    of the global batch; during a batch size rampup the trainer sets those of the step.
    """

    layout = REPLICATED

    def __init__(self, hidden_size: int, config: MoEConfig, balancing: Balancing = ONE_RANK) -> None:
        super().__init__()
        self.config, self.balancing = config, balancing
        self.load = ExpertLoad(config.num_experts)
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router_bias else None
        # No buffer: it is no weight of the model, but a state of its training.
        self.previous_load_E = torch.zeros(config.num_experts) if config.balance_loss == "global" else None
        self.loss_scale: Tensor | None = None
        self.microbatches: int | Tensor = balancing.microbatches
        self.expert_bias: Tensor | None
        self.register_buffer(
            "expert_bias", torch.zeros(config.num_experts, dtype=torch.float32) if config.balance_bias else None
        )

    def forward(self, x_TH: Tensor, sequences: int, jitter: RouterJitter | None = None) -> Routing:
        """Route tokens [T, H], of `sequences` sequences; while gradients are recorded, balance the load too."""
        config, dtype = self.config, _DTYPES[self.config.router_dtype]
        bias = None if self.bias is None else local_param(self.bias)
        x_TH = x_TH if jitter is None else jitter(x_TH.to(dtype))
        logits_TE = router_linear(x_TH, local_param(self.weight), bias, dtype)
        scores_TE = score_experts(logits_TE, config.score)
        if config.choice == "sinkhorn" and torch.is_grad_enabled():
            expert_ids_Tk = self.choose_balanced(logits_TE.detach())
        else:
            expert_ids_Tk = self.choose(scores_TE.detach())
        weights_Tk = expert_weights(
            scores_TE, expert_ids_Tk, normalize=config.normalize_top_k, scaling_factor=config.scaling_factor
        )
        if not torch.is_grad_enabled():
            return Routing(expert_ids_Tk, weights_Tk)
        counts_BE = count_tokens(expert_ids_Tk, config.num_experts, sequences)
        best_BE = self.count_best(scores_TE.detach(), counts_BE)
        losses = router_losses(config, self.balancing, logits_TE, scores_TE, best_BE, self.previous_load_E)
        if losses.attached:
            weights_Tk = attach_loss(weights_Tk, losses.total / self.microbatches, self.loss_scale)
        routing = limit_to_capacity(config, self.balancing, Routing(expert_ids_Tk, weights_Tk), sequences)
        dropped = routing.count_dropped(config.num_experts)
        probability = router_probability(scores_TE.detach(), expert_ids_Tk).sum()
        self.load.record(logits_TE, counts_BE, best_BE, losses, probability, dropped, self.microbatches)
        return routing

    def count_best(self, scores_TE: Tensor, chosen_BE: Tensor) -> Tensor:
        """Return how often each expert is among the best k of all scores, [B, E]; `chosen_BE`: how often it is chosen.

        They differ where the expert bias or groups decide on the choice; the balance loss is about the scores
        (DeepSeek-V3 report, equation 18; Megatron-LM).
        """
        config = self.config
        if config.balance_loss == "none" or (self.expert_bias is None and config.num_groups is None):
            return chosen_BE
        return count_tokens(top_k_stable(scores_TE, config.top_k), config.num_experts, chosen_BE.shape[0])

    def choose_balanced(self, logits_TE: Tensor) -> Tensor:
        """Return the experts [T, k] of each token, by an assignment of the tokens of all ranks that share sequences."""
        tokens, rank = logits_TE.shape[0], self.balancing.rank
        assignment_AE = sinkhorn(self.balancing.gather_tokens(logits_TE))
        return top_k_stable(assignment_AE[rank * tokens : (rank + 1) * tokens], self.config.top_k)

    def choose(self, scores_TE: Tensor) -> Tensor:
        """Return the experts [T, k] of each token."""
        config = self.config
        if self.expert_bias is not None:
            scores_TE = scores_TE + self.expert_bias
        if config.num_groups is not None and config.top_k_groups is not None:
            scores_TE = mask_other_groups(scores_TE, config.num_groups, config.top_k_groups, config.group_score_top_k)
        return top_k_stable(scores_TE, config.top_k)
