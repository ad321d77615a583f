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
        weight, epsilon = local_param(self.weight), self.config.epsilon
        bias = None if self.bias is None else local_param(self.bias)
        dtype = weight.dtype
        if self.config.zero_centered_gamma:  # in 16 bits, 1 + weight would lose most of a small weight
            x, weight = x.float(), 1 + weight.float()
        elif x.dtype != dtype:  # x is a residual stream in fp32
            weight = weight.to(x.dtype)
        if self.config.layer:
            normed = F.layer_norm(x, weight.shape, weight, None if bias is None else bias.to(x.dtype), epsilon)
        else:
            normed = rms_norm(x, weight, epsilon)
        return normed if normed.dtype == dtype else normed.to(dtype)
