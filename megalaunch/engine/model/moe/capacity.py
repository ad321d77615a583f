"""The capacity of experts, and the tokens that a full expert drops during training.

Capacity is that of a microbatch: of the N tokens of its sequences, over all ranks that share them, each expert takes
at most ceil(factor k N / E). So the same tokens are dropped whatever tp, cp, dp, ep and pp are. Evaluation and
generation drop nothing: a token's output must not depend on the others of its batch.
Shapes: T tokens of this rank, N tokens of the microbatch, k experts per token, P = N k pairs, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalaunch.engine.model.config import MoEConfig
from megalaunch.engine.model.moe.balancing import Balancing
from megalaunch.engine.model.moe.routing import Routing


def expert_capacity(config: MoEConfig, factor: float, tokens: int) -> int:
    """Return how many of a microbatch's tokens an expert takes: at least 1."""
    return max(1, math.ceil(factor * config.top_k * tokens / config.num_experts))


def limit_to_capacity(config: MoEConfig, balancing: Balancing, routing: Routing, sequences: int) -> Routing:
    """Return a routing in which no expert has more pairs than its capacity. Collective over the microbatch's ranks.

    `drop_policy` decides which pairs a full expert drops: those of the lowest weight (of equal weights the last), or
    the last. Tokens are in the order of their positions, at one position in that of their sequences. The weights of
    other pairs do not change.
    """
    if config.capacity_factor is None:
        return routing
    ids_Tk, weights_Tk = routing.expert_ids_Tk, routing.weights_Tk
    tokens = ids_Tk.shape[0]
    capacity = expert_capacity(config, config.capacity_factor, tokens * balancing.num_ranks)
    positions_s = balancing.position_ids(tokens // sequences, ids_Tk.device)
    order_T = (positions_s * sequences + torch.arange(sequences, device=ids_Tk.device)[:, None]).flatten()
    order_N = torch.argsort(balancing.gather_tokens(order_T))
    ids_Nk = balancing.gather_tokens(ids_Tk)[order_N]
    priority_P = None
    if config.drop_policy == "probs":
        priority_P = balancing.gather_tokens(weights_Tk.detach())[order_N].flatten()
    dropped_Nk = exceeds_capacity(ids_Nk.flatten(), priority_P, capacity).view_as(ids_Nk)
    dropped_Nk = torch.empty_like(dropped_Nk).index_copy_(0, order_N, dropped_Nk)
    dropped_Tk = dropped_Nk[balancing.rank * tokens : (balancing.rank + 1) * tokens]
    return Routing(
        ids_Tk.masked_fill(dropped_Tk, config.num_experts),
        weights_Tk.masked_fill(dropped_Tk, 0),
        drops=True,
        padded_rows=min(capacity, tokens) if config.pad_to_capacity else None,
    )


def exceeds_capacity(ids_P: Tensor, priority_P: Tensor | None, capacity: int) -> Tensor:
    """Return which pairs are beyond the first `capacity` of their expert, bool [P].

    The first are those of the highest priority, and among equal ones, or without priorities, those with the lowest
    index.
    """
    order_P = torch.arange(ids_P.shape[0], device=ids_P.device)
    if priority_P is not None:
        order_P = torch.argsort(priority_P, descending=True, stable=True)
    order_P = order_P[torch.argsort(ids_P[order_P], stable=True)]
    sorted_P = ids_P[order_P]
    place_P = torch.arange(ids_P.shape[0], device=ids_P.device) - torch.searchsorted(sorted_P, sorted_P)
    return torch.empty_like(ids_P, dtype=torch.bool).scatter_(0, order_P, place_P >= capacity)
