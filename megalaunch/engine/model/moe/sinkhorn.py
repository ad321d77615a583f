"""The balanced choice of experts by Sinkhorn's iteration (Clark et al. 2022, S-BASE; Megatron-LM's `sinkhorn`).

Rows and columns of the matrix exp(logits) are scaled in turn until each token has the mass 1 / T and each expert 1 / E;
a token's experts are those with its largest entries. Shapes: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-4
MAX_ITERATIONS = 100
_EPSILON = 1e-8  # Megatron-LM's


def sinkhorn(logits_TE: Tensor) -> Tensor:
    """Return the balanced assignment, fp32 [T, E]. It has no gradient.

    The iteration ends when the factors of experts change by at most `TOLERANCE` of their mean, and at the latest after
    `MAX_ITERATIONS`. Megatron-LM compares with an absolute 1e-4 and has no limit: with few tokens, or logits of a
    standard deviation of 3 and more, its factors are so large that the loop does not end. Each token's largest logit is
    subtracted first, which scales its row only, and keeps exp from an overflow. The scaling is frozen on the device
    once it has converged, so that the host reads nothing.
    """
    logits_TE = logits_TE.detach().float()
    mass_TE = (logits_TE - logits_TE.amax(-1, keepdim=True)).exp()
    tokens, experts = mass_TE.shape
    by_expert_E = mass_TE.new_ones(experts)
    by_token_T = mass_TE.new_ones(tokens)
    converged = torch.zeros((), dtype=torch.bool, device=mass_TE.device)
    for _ in range(MAX_ITERATIONS):
        next_T = 1 / (tokens * ((by_expert_E * mass_TE).sum(1) + _EPSILON))
        next_E = 1 / (experts * ((next_T[:, None] * mass_TE).sum(0) + _EPSILON))
        change = (next_E - by_expert_E).abs().mean()
        by_token_T = by_token_T.where(converged, next_T)
        by_expert_E_before, by_expert_E = by_expert_E, by_expert_E.where(converged, next_E)
        converged = converged | (change <= TOLERANCE * by_expert_E_before.mean())
    return by_expert_E * mass_TE * by_token_T[:, None]
