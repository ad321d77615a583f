"""Permute tokens into the order of their experts, and sum the experts' outputs back per token.

`REFERENCE` is plain torch, `triton_kernels` the form for GPUs (operators.py).

Each of T tokens has k experts: T k pairs. A row is a pair in the order of experts; pairs of one expert keep the order
of their tokens, so that it does not depend on the device. Both directions and their gradients are gathers by row
numbers, and no scatter-add: sums have one order on every device.
Shapes: T tokens, k experts per token, R rows, E experts, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.forms import RowKernels, kernel_forms, uses_triton


@dataclass(frozen=True)
class Permutation:
    """The order of pairs by expert.

    Attributes:
        pairs_R: The pair of each row: token t with its j-th expert is t k + j.
        rows_Tk: The row of each pair.
    """

    pairs_R: Tensor
    rows_Tk: Tensor


def sort_by_expert(expert_ids_Tk: Tensor, num_experts: int) -> tuple[Permutation, Tensor]:
    """Return the order of all pairs by expert, and how many rows each expert has, int64 [E].

    Pairs with the id E have no expert: their rows come last and are not counted.
    """
    ids = expert_ids_Tk.flatten()
    pairs_R = torch.argsort(ids, stable=True)
    numbers = torch.arange(ids.numel(), device=ids.device)
    rows_Tk = torch.empty_like(pairs_R).scatter_(0, pairs_R, numbers).view_as(expert_ids_Tk)
    counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    return Permutation(pairs_R, rows_Tk), counts[:num_experts]


def keep_rows(permutation: Permutation, rows: int) -> Permutation:
    """Return the order of the first `rows` rows, and one more row, which stands for all other pairs.

    Callers remove that row of `permute`, and give `unpermute` zeros for it.
    """
    return Permutation(F.pad(permutation.pairs_R[:rows], (0, 1)), permutation.rows_Tk.clamp(max=rows))


def pad_rows(permutation: Permutation, counts_E: Tensor, size: int) -> tuple[Permutation, Tensor]:
    """Return an order with `size` rows for each expert, at least its number of pairs, and one more as `keep_rows`.

    The second tensor, bool [E size], is True for the rows that pad. They hold the first token, and callers must ignore
    what comes of them.
    """
    num_experts, (tokens, choices) = counts_E.shape[0], permutation.rows_Tk.shape
    numbers_R = torch.arange(tokens * choices, device=counts_E.device)
    ends_E = counts_E.cumsum(0)
    expert_R = torch.searchsorted(ends_E, numbers_R, right=True)  # E for a pair without expert
    starts = F.pad(ends_E - counts_E, (0, 1))
    slots_R = (expert_R * size + numbers_R - starts[expert_R]).where(expert_R < num_experts, num_experts * size)
    pairs = permutation.pairs_R.new_zeros(num_experts * size + 1).scatter_(0, slots_R, permutation.pairs_R)
    pairs[-1] = 0
    padding = torch.arange(size, device=counts_E.device) >= counts_E[:, None]
    return Permutation(pairs, slots_R[permutation.rows_Tk]), padding.flatten()


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
        return _kernels(x_TH).gather(x_TH, permutation.pairs_R, permutation.rows_Tk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _kernels(gradients[0]).sum(gradients[0], ctx.permutation.rows_Tk, None), None


class _Unpermute(torch.autograd.Function):
    """y_t = sum_j w_tj y_r(t, j). Backward: dy_r = w_r dy_t,  dw_tj = y_r . dy_t."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, weights_Tk: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        ctx.save_for_backward(y_RH, weights_Tk)
        return _kernels(y_RH).sum(y_RH, permutation.rows_Tk, weights_Tk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RH, weights_Tk = ctx.saved_tensors
        permutation: Permutation = ctx.permutation
        dy_RH, dweights_Tk = _kernels(y_RH).weigh(
            gradients[0], y_RH, permutation.pairs_R, permutation.rows_Tk, weights_Tk
        )
        return dy_RH, dweights_Tk, None


def _kernels(x: Tensor) -> RowKernels:
    """Return the form for the device of `x`."""
    form = kernel_forms().row_kernels
    if form is not None:
        return form
    return triton_kernels() if uses_triton(x) else REFERENCE


@cache
def triton_kernels() -> RowKernels:
    """Return the Triton form, which imports Triton when it runs."""
    from megalaunch.kernels import operators

    return RowKernels(operators.gather_rows, operators.sum_rows, operators.weigh_rows)


def _gather_rows(x_TH: Tensor, pairs_R: Tensor, rows_Tk: Tensor) -> Tensor:
    """Return the token of each row."""
    return x_TH.index_select(0, pairs_R // rows_Tk.shape[1])


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


def _weigh_rows(
    dy_TH: Tensor, y_RH: Tensor, pairs_R: Tensor, rows_Tk: Tensor, weights_Tk: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows, w_r dy_t, and of weights, y_r . dy_t."""
    weights_R = weights_Tk.flatten()[pairs_R]
    dy_RH = (_gather_rows(dy_TH, pairs_R, rows_Tk) * weights_R[:, None]).to(y_RH.dtype)
    wide_TH = dy_TH.to(weights_Tk.dtype)
    dweights = [(y_RH.index_select(0, rows_T) * wide_TH).sum(-1) for rows_T in rows_Tk.unbind(1)]
    return dy_RH, torch.stack(dweights, dim=1)


REFERENCE = RowKernels(_gather_rows, _sum_rows, _weigh_rows)
"""The plain-torch form."""
