"""RMSNorm and LayerNorm over the last dim. sharded_norm.py has the norm over features that are sharded over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.param_layout import REPLICATED, ParamLayout, local_param
from megalaunch.kernels.rms_norm import rms_norm


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
