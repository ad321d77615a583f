"""Permute tokens into the order of their experts, and sum the experts' outputs back per token: plain torch.

Each of T tokens has k experts: T k pairs. A row is a pair in the order of experts; pairs of one expert keep the order
of their tokens, so that it does not depend on the device. Both directions and their gradients are gathers by row
numbers, and no scatter-add: sums have one order on every device.
Shapes: T tokens, k experts per token, R rows, E experts, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """The order of pairs by expert.

    Attributes:
        pairs_R: The pair of each row: token t with its j-th expert is t k + j.
        rows_Tk: The row of each pair.
    """

    pairs_R: Tensor
    rows_Tk: Tensor

    @property
    def tokens_R(self) -> Tensor:
        """The token of each row."""
        return self.pairs_R // self.rows_Tk.shape[1]


def sort_by_expert(expert_ids_Tk: Tensor, num_experts: int) -> tuple[Permutation, Tensor]:
    """Return the order of all pairs by expert, and how many rows each expert has, int64 [E]."""
    ids = expert_ids_Tk.flatten()
    pairs_R = torch.argsort(ids, stable=True)
    numbers = torch.arange(ids.numel(), device=ids.device)
    rows_Tk = torch.empty_like(pairs_R).scatter_(0, pairs_R, numbers).view_as(expert_ids_Tk)
    counts_E = ids.new_zeros(num_experts).scatter_add_(0, ids, torch.ones_like(ids))
    return Permutation(pairs_R, rows_Tk), counts_E


def permute(x_TH: Tensor, permutation: Permutation) -> Tensor:
    """Return the token of each row, [T, H] -> [R, H]. Differentiable."""
    permuted: Tensor = _Permute.apply(x_TH, permutation)
    return permuted


def unpermute(y_RH: Tensor, permutation: Permutation, weights_Tk: Tensor) -> Tensor:
    """Return each token's weighted sum of its rows, [R, H] -> [T, H], accumulated in fp32. Differentiable."""
    summed: Tensor = _Unpermute.apply(y_RH, weights_Tk, permutation)
    return summed


class _Permute(torch.autograd.Function):
    """x_r = x_t. Backward: dx_t = sum over the rows r of token t of dx_r."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return x_TH.index_select(0, permutation.tokens_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(gradients[0], ctx.permutation.rows_Tk, None), None


class _Unpermute(torch.autograd.Function):
    """y_t = sum_j w_tj y_r(t, j). Backward: dy_r = w_r dy_t,  dw_tj = y_r . dy_t."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weights_Tk: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        ctx.save_for_backward(y_RH, weights_Tk)
        return _sum_rows(y_RH, permutation.rows_Tk, weights_Tk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RH, weights_Tk = ctx.saved_tensors
        permutation, dy_TH = ctx.permutation, gradients[0]
        weights_R = weights_Tk.flatten()[permutation.pairs_R]
        dy_RH = (dy_TH.index_select(0, permutation.tokens_R) * weights_R[:, None]).to(y_RH.dtype)
        wide_TH = dy_TH.to(weights_Tk.dtype)
        dweights = [(y_RH.index_select(0, rows_T) * wide_TH).sum(-1) for rows_T in permutation.rows_Tk.unbind(1)]
        return dy_RH, torch.stack(dweights, dim=1), None


def _sum_rows(y_RH: Tensor, rows_Tk: Tensor, weights_Tk: Tensor | None) -> Tensor:
    """Return the (weighted) sum of each token's rows, in the order of its experts."""
    wide = torch.float32 if weights_Tk is None else weights_Tk.dtype
    total_TH = torch.zeros(
        rows_Tk.shape[0], y_RH.shape[1], dtype=torch.promote_types(y_RH.dtype, wide), device=y_RH.device
    )
    for choice, rows_T in enumerate(rows_Tk.unbind(1)):
        y_TH = y_RH.index_select(0, rows_T)
        if weights_Tk is None:
            total_TH += y_TH
        else:
            total_TH += y_TH * weights_Tk[:, choice, None]
    return total_TH.to(y_RH.dtype)
