"""Norms over the last dimension: RMSNorm and LayerNorm, and their form over features that ranks divide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.layout import EVERYWHERE, ParamLayout, local
from megalaunch.engine.model.config import NormConfig


class Norm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), or LayerNorm with its bias (Ba et al., 2016)."""

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout = EVERYWHERE) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if config.layer else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the weight's format; statistics are taken in fp32 whatever that of x."""
        weight, shape, epsilon = local(self.weight), self.weight.shape, self.config.epsilon
        if self.config.plus_one:  # the sum would lose most of a small weight in a half format
            wide, dtype = 1 + weight.float(), weight.dtype
            bias = local(self.bias).float() if self.bias is not None else None
            normed = F.layer_norm(x.float(), shape, wide, bias, epsilon) if self.config.layer else None
            return (F.rms_norm(x.float(), shape, wide, epsilon) if normed is None else normed).to(dtype)
        bias = None if self.bias is None else local(self.bias).to(x.dtype)
        factor = weight.to(x.dtype)  # a residual stream may be wider
        if self.config.layer:
            return F.layer_norm(x, shape, factor, bias, epsilon).to(weight.dtype)
        return F.rms_norm(x, shape, factor, epsilon).to(weight.dtype)
