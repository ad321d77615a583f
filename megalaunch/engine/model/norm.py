"""Norms over the last dimension: RMSNorm and LayerNorm, and their form over features that ranks divide."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.param_layout import REPLICATED, ParamLayout, local_param


class Norm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), or LayerNorm with its bias (Ba et al., 2016)."""

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout = REPLICATED) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if config.layer else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the weight's format; statistics are taken in fp32 whatever that of x."""
        weight, shape, epsilon = local_param(self.weight), self.weight.shape, self.config.epsilon
        if self.config.zero_centered_gamma:  # the sum would lose most of a small weight in a half format
            wide, dtype = 1 + weight.float(), weight.dtype
            bias = local_param(self.bias).float() if self.bias is not None else None
            normed = F.layer_norm(x.float(), shape, wide, bias, epsilon) if self.config.layer else None
            return (rms_norm(x.float(), wide, epsilon) if normed is None else normed).to(dtype)
        bias = None if self.bias is None else local_param(self.bias).to(x.dtype)
        factor = weight.to(x.dtype)  # a residual stream may be wider
        if self.config.layer:
            return F.layer_norm(x, shape, factor, bias, epsilon).to(weight.dtype)
        return rms_norm(x, factor, epsilon).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; torch has it as one operator on a GPU only."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """In few passes on a processor: keeps its input and 1 / rms in fp32 for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dy, wide, factor = gradients[0].float(), x.float(), weight.float()
        products = (dy * wide).flatten(0, -2)  # its columns sum to the weight's gradient, its rows to their share
        dweight = inverse.flatten() @ products
        share = (products @ factor).view_as(inverse).mul_(inverse.pow(3)).div_(x.shape[-1])
        dx = torch.mul(dy, factor, out=products.view_as(dy)).mul_(inverse).addcmul_(wide, share, value=-1)
        return dx.to(x.dtype), dweight.to(weight.dtype), None
