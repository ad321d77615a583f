"""The choice of a token's experts, and the pure functions that make it: scores, group limits and top-k.

Shapes: T tokens, E experts, k experts per token, G groups of experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.overridable import overridable
from megalaunch.schema.moe import ScoreFunction

_EPSILON = 1e-20  # of normalized sigmoid scores, as in DeepSeek-V3 and Megatron-LM


@dataclass(frozen=True)
class Routing:
    """The experts of each token.

    Attributes:
        expert_ids_Tk: int64; the number of experts in place of one that drops the token.
        weights_Tk: In the router's dtype; they carry its gradient. 0 for a dropped pair.
        drops: Experts have a capacity, so that pairs may be dropped.
        padded_rows: The rows to which the input of each expert is padded; None: no padding.
    """

    expert_ids_Tk: Tensor
    weights_Tk: Tensor
    drops: bool = False
    padded_rows: int | None = None

    def split(self, parts: int) -> list[Routing]:
        """Return the routings of that many parts of the tokens, as `Tensor.tensor_split` makes them."""
        pieces = zip(self.expert_ids_Tk.tensor_split(parts), self.weights_Tk.tensor_split(parts), strict=True)
        return [
            replace(
                self,
                expert_ids_Tk=ids,
                weights_Tk=weights,
                padded_rows=None if self.padded_rows is None else min(self.padded_rows, ids.shape[0]),
            )
            for ids, weights in pieces
        ]

    def count_dropped(self, num_experts: int) -> Tensor:
        """Return the number of dropped pairs."""
        return (self.expert_ids_Tk == num_experts).sum()


@overridable
def score_experts(logits_TE: Tensor, function: ScoreFunction) -> Tensor:
    """Return the scores of all experts: the softmax over experts, or a function of each logit.

    `sqrtsoftplus` is sqrt(log(1 + e^x)), as in Megatron-LM.
    """
    if function == "softmax":
        return logits_TE.softmax(-1)
    return logits_TE.sigmoid() if function == "sigmoid" else F.softplus(logits_TE).sqrt()


@overridable
def top_k_stable(scores_TE: Tensor, k: int) -> Tensor:
    """Return the indices [T, k] of the largest scores; of equal scores the expert with the lower index wins.

    `torch.topk` leaves the order of equal scores to the device and to the number of tokens.
    """
    # A copy: a view would hold the order of all experts until the backward pass.
    return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def mask_other_groups(scores_TE: Tensor, num_groups: int, top_k_groups: int, scored: int) -> Tensor:
    """Set the scores of experts outside of each token's best groups to -inf (DeepSeek-V3 report, section 2.1.2).

    A group's score is the sum of its best `scored` scores.
    """
    scores_TGe = scores_TE.view(scores_TE.shape[0], num_groups, -1)
    best_TGn = scores_TGe.topk(scored, dim=-1).values
    chosen = top_k_stable(best_TGn.sum(-1), top_k_groups)
    others_TG = torch.ones_like(best_TGn[..., 0], dtype=torch.bool).scatter(1, chosen, False)
    return scores_TGe.masked_fill(others_TG[..., None], -math.inf).flatten(1)


def expert_weights(scores_TE: Tensor, expert_ids_Tk: Tensor, *, normalize: bool, scaling_factor: float) -> Tensor:
    """Return the weights [T, k] of each token's experts: their scores, normalized to a sum of 1 if so, and scaled."""
    weights_Tk = scores_TE.gather(1, expert_ids_Tk)
    if normalize:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _EPSILON)
    return weights_Tk if scaling_factor == 1 else weights_Tk * scaling_factor


def router_probability(scores_TE: Tensor, expert_ids_Tk: Tensor) -> Tensor:
    """Return the share of each token's scores that its experts have, [T]: k / E for an undecided router, at most 1."""
    return scores_TE.gather(1, expert_ids_Tk).sum(-1) / (scores_TE.sum(-1) + _EPSILON)
