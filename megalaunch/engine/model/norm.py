"""RMSNorm and LayerNorm over the last dim. sharded_norm.py has the norm over features that are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.param_layout import REPLICATED, ParamLayout, local_param


class Norm(nn.Module):
    """RMSNorm: x / rms(x) * weight (Zhang and Sennrich, 2019), or LayerNorm with its bias (Ba et al., 2016)."""

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout = REPLICATED) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if config.layer else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size] -> [..., size] in the weight's dtype; statistics are fp32 whatever the dtype of x."""
        weight, shape, epsilon = local_param(self.weight), self.weight.shape, self.config.epsilon
        if self.config.zero_centered_gamma:  # in 16 bits, 1 + weight would lose most of a small weight
            wide, dtype = 1 + weight.float(), weight.dtype
            bias = local_param(self.bias).float() if self.bias is not None else None
            normed = F.layer_norm(x.float(), shape, wide, bias, epsilon) if self.config.layer else None
            return (rms_norm(x.float(), wide, epsilon) if normed is None else normed).to(dtype)
        bias = None if self.bias is None else local_param(self.bias).to(x.dtype)
        factor = weight.to(x.dtype)  # x may be a residual stream in fp32
        if self.config.layer:
            return F.layer_norm(x, shape, factor, bias, epsilon).to(weight.dtype)
        return rms_norm(x, factor, epsilon).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / rms(x) * weight over the last dim. torch has it as one operator on a GPU only."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, epsilon)
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in few passes on a CPU. Saves x and, for each row, r = 1 / rms(x) in fp32.

    Forward:   y = x r w
    Backward:  dw = sum over rows of dy x r,  dx = dy w r - x r^3 mean(dy w x)
    """

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
        products = (dy * wide).flatten(0, -2)  # dy x; sums over rows give dw, over features the mean in dx
        dweight = inverse.flatten() @ products
        share = (products @ factor).view_as(inverse).mul_(inverse.pow(3)).div_(x.shape[-1])
        dx = torch.mul(dy, factor, out=products.view_as(dy)).mul_(inverse).addcmul_(wide, share, value=-1)
        return dx.to(x.dtype), dweight.to(weight.dtype), None
