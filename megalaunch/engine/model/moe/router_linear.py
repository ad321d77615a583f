"""The router's linear layer in a wider dtype than its input, without a saved copy of the input.

Shapes: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.kernels.matmul import linear, needs_grad


def router_linear(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x W^T + b in `dtype`, [T, H] -> [T, E]. Differentiable."""
    if x_TH.dtype == dtype:
        return linear(x_TH, weight_EH.to(dtype), None if bias_E is None else bias_E.to(dtype))
    # A view is no leaf (`needs_grad`).
    bias = None if bias_E is None else bias_E.view_as(bias_E)
    return apply_function(_CastLinear, x_TH, weight_EH.view_as(weight_EH), bias, dtype)


class _CastLinear(torch.autograd.Function):
    """y = x W^T + b. Backward: dx = dy W, dW = dy^T x, db = sum of dy. Operands are cast again in backward."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        return F.linear(x_TH.to(dtype), weight_EH.to(dtype), None if bias_E is None else bias_E.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (dy_TE,) = gradients
        x_TH, weight_EH = ctx.saved_tensors
        dx = (dy_TE @ weight_EH.to(dy_TE.dtype)).to(x_TH.dtype) if needs_grad(ctx, 0) else None
        dw = (dy_TE.T @ x_TH.to(dy_TE.dtype)).to(weight_EH.dtype) if needs_grad(ctx, 1) else None
        db = dy_TE.sum(0).to(ctx.bias_dtype) if ctx.bias_dtype is not None and needs_grad(ctx, 2) else None
        return dx, dw, db, None
