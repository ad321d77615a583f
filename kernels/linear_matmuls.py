"""The three matmuls of a linear layer as an object, so that a layer can compute them in another precision.

Forward:   y = x W^T
Backward:  dx = dy W,  dW = dy^T x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalaunch.kernels.matmul import linear, matmul, needs_grad


@dataclass(frozen=True)
class OutputGrad:
    """The gradient of a layer's output, [..., F], as both matmuls of the backward pass take it."""

    dy: Tensor


class LinearMatmuls(Protocol):
    """The matmuls of one linear layer. Shapes: T tokens, H input features, F output features."""

    def output(self, x: Tensor, weight_FH: Tensor) -> Tensor:
        """Return x W^T, [..., H] -> [..., F]."""

    def prepare(self, dy: Tensor, both: bool) -> OutputGrad:
        """Return dy, with what a conversion of it shares between the two matmuls if `both` follow."""

    def input_grad(self, grad: OutputGrad, weight_FH: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dy W, or onto + dy W: [..., F] -> [..., H]."""

    def weight_grad(self, grad: OutputGrad, x_TH: Tensor) -> Tensor:
        """Return dy^T x, [F, H]."""


class ComputeDtypeMatmuls:
    """Matmuls in the dtype of their operands."""

    def output(self, x: Tensor, weight_FH: Tensor) -> Tensor:
        """Return x W^T."""
        return matmul(x, weight_FH.T)

    def prepare(self, dy: Tensor, both: bool) -> OutputGrad:
        """Return dy."""
        return OutputGrad(dy)

    def input_grad(self, grad: OutputGrad, weight_FH: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return dy W, or onto + dy W."""
        return matmul(grad.dy, weight_FH, onto=onto)

    def weight_grad(self, grad: OutputGrad, x_TH: Tensor) -> Tensor:
        """Return dy^T x."""
        return matmul(grad.dy.flatten(0, -2).T, x_TH)


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
        wanted, matmuls = [needs_grad(ctx, number) for number in (0, 1)], ctx.matmuls
        dy = matmuls.prepare(gradients[0], all(wanted))
        dx = matmuls.input_grad(dy, weight) if wanted[0] else None
        dweight = matmuls.weight_grad(dy, x.flatten(0, -2)) if wanted[1] else None
        return dx, dweight, None
