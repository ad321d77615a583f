"""The three matmuls of a linear layer as an object, so that a layer can compute them in another precision.

Forward:   y = x W^T
Backward:  dx = dy W,  dW = dy^T x
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megalaunch.kernels.matmul import linear, matmul, needs_grad


class LinearMatmuls(Protocol):
    """The matmuls of one linear layer. Shapes: T tokens, H input features, F output features."""

    def output(self, x: Tensor, weight_FH: Tensor) -> Tensor:
        """Return x W^T, [..., H] -> [..., F]."""

    def input_grad(self, dy: Tensor, weight_FH: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dy W, or onto + dy W: [..., F] -> [..., H]."""

    def weight_grad(self, dy_TF: Tensor, x_TH: Tensor) -> Tensor:
        """Return dy^T x, [F, H]."""


class ComputeDtypeMatmuls:
    """Matmuls in the dtype of their operands."""

    def output(self, x: Tensor, weight_FH: Tensor) -> Tensor:
        """Return x W^T."""
        return matmul(x, weight_FH.T)

    def input_grad(self, dy: Tensor, weight_FH: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dy W, or onto + dy W."""
        return matmul(dy, weight_FH, onto=onto)

    def weight_grad(self, dy_TF: Tensor, x_TH: Tensor) -> Tensor:
        """Return dy^T x."""
        return matmul(dy_TF.T, x_TH)


COMPUTE_DTYPE = ComputeDtypeMatmuls()


def linear_by(matmuls: LinearMatmuls, x: Tensor, weight_FH: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [..., H] -> [..., F], by the given matmuls. Differentiable."""
    if matmuls is COMPUTE_DTYPE:
        return linear(x, weight_FH, bias_F)
    # A view is no leaf: for a leaf, `needs_grad` cannot tell whether a pass computes its gradient.
    y: Tensor = _Linear.apply(x, weight_FH.view_as(weight_FH), matmuls)
    return y if bias_F is None else y + bias_F


class _Linear(torch.autograd.Function):
    """Linear layer by its three matmuls. x is saved in its own dtype: each matmul casts along the dim that it sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matmuls: LinearMatmuls) -> Tensor:
        ctx.matmuls = matmuls
        ctx.save_for_backward(x, weight)
        return matmuls.output(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (dy,), matmuls = gradients, ctx.matmuls
        dx = matmuls.input_grad(dy, weight) if needs_grad(ctx, 0) else None
        dweight = matmuls.weight_grad(dy.flatten(0, -2), x.flatten(0, -2)) if needs_grad(ctx, 1) else None
        return dx, dweight, None
