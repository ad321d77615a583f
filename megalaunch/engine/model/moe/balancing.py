"""Balancing the load of experts: auxiliary losses, the router z-loss, and the bias of aux-loss-free routing.

Losses are attached to the weights of the experts by an autograd function: earlier pipeline stages have no other path to
the loss. A step's auxiliary loss is the mean over the microbatches of the global batch, summed over layers.
Shapes: T tokens of this rank, B sequences, s this rank's tokens of each, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.config import MoEConfig


def _one_rank(of_tokens: Tensor) -> Tensor:
    return of_tokens


def _all_positions(tokens: int, device: torch.device) -> Tensor:
    return torch.arange(tokens, device=device)


@dataclass(frozen=True)
class Balancing:
    """What the balance of a router depends on besides its tokens.

    Attributes:
        microbatches: Microbatches of the (final) global batch, over all data-parallel ranks.
        num_ranks: Ranks that share a microbatch's sequences: cp, and tp under sequence parallelism.
        rank: The index of this one.
        sum_counts: Sums counts over these ranks. Collective.
        gather_tokens: All-gathers values of tokens [T, ...] over these ranks, along tokens. Collective.
        position_ids: Takes the number of this rank's tokens of a sequence; returns their positions in it.
    """

    microbatches: int = 1
    num_ranks: int = 1
    rank: int = 0
    sum_counts: Callable[[Tensor], Tensor] = _one_rank
    gather_tokens: Callable[[Tensor], Tensor] = _one_rank
    position_ids: Callable[[int, torch.device], Tensor] = _all_positions


ONE_RANK = Balancing()


@dataclass(frozen=True)
class RouterLosses:
    """This rank's parts of a router's losses for one microbatch; sums over ranks are the losses.

    `attached`: some loss has a coefficient, so that the router learns from it.
    """

    balance: Tensor
    z: Tensor
    attached: bool

    @property
    def total(self) -> Tensor:
        """The sum of the losses."""
        return self.balance + self.z


def count_tokens(expert_ids_Tk: Tensor, num_experts: int, sequences: int) -> Tensor:
    """Return how many tokens of each sequence go to each expert, [B, E], in fp32."""
    ids = expert_ids_Tk.reshape(sequences, -1)
    return torch.zeros(sequences, num_experts, device=ids.device).scatter_add_(1, ids, torch.ones_like(ids).float())


def router_losses(
    config: MoEConfig,
    balancing: Balancing,
    logits_TE: Tensor,
    scores_TE: Tensor,
    counts_BE: Tensor,
    previous_load_E: Tensor | None = None,
) -> RouterLosses:
    """Return the losses of one microbatch, each with its coefficient.

    With c_e the tokens that have expert e among their best k scores (`counts_BE`, [B, E]), p_te the scores of token
    t, normalized to a sum of 1, and N tokens:

        balance = coeff E / (k N^2) sum_e c_e sum_t p_te      (Fedus et al. 2021; Megatron-LM)
        z       = coeff / N sum_t logsumexp_e(logits_te)^2    (Zoph et al. 2022)

    `balance_loss=sequence` computes the balance loss of each sequence and averages over sequences. Counts and N are
    those of all ranks that share the sequences; the sums over tokens are over this rank's tokens.
    `balance_loss=global` has `previous_load_E` in place of c_e / (k N): the shares of the global batch of the step
    before, 0 in the first step. Those of this step are known only when its backward passes are over.
    """
    zero = logits_TE.new_zeros(())
    if config.balance_loss == "none" and not config.z_loss_coeff:
        return RouterLosses(zero, zero, attached=False)
    if config.balance_loss != "sequence":
        counts_BE = counts_BE.sum(0, keepdim=True)
    groups = counts_BE.shape[0]
    counts_BE = balancing.sum_counts(counts_BE)
    tokens = counts_BE.sum() / config.top_k  # of all sequences, on all ranks
    balance = z = zero
    if config.balance_loss != "none":
        shares_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20) if config.score != "softmax" else scores_TE
        sums_BE = shares_TE.view(groups, -1, config.num_experts).sum(1)
        if previous_load_E is None:
            factor = config.balance_loss_coeff * config.num_experts * groups / config.top_k
            balance = factor / tokens.square() * (counts_BE * sums_BE).sum()
        else:
            factor = config.balance_loss_coeff * config.num_experts
            balance = factor / tokens * (previous_load_E * sums_BE).sum()
    if config.z_loss_coeff:
        z = config.z_loss_coeff / tokens * logits_TE.logsumexp(-1).square().sum()
    return RouterLosses(balance, z, attached=True)


def attach_loss(weights_Tk: Tensor, loss: Tensor, loss_scale: Tensor | None = None) -> Tensor:
    """Return the weights; the backward pass adds the gradient of the loss times the loss scale of fp16."""
    return apply_function(_AttachLoss, weights_Tk, loss, loss_scale)


class _AttachLoss(torch.autograd.Function):
    """y = w. Backward: dw = dy, dloss = loss_scale, whatever the gradient of the training loss."""

    @staticmethod
    def forward(ctx: Any, weights_Tk: Tensor, loss: Tensor, loss_scale: Tensor | None) -> Tensor:
        ctx.loss_scale = loss_scale
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return weights_Tk.view_as(weights_Tk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dloss = torch.ones((), dtype=ctx.dtype, device=ctx.device)
        return gradients[0], dloss if ctx.loss_scale is None else dloss * ctx.loss_scale, None
