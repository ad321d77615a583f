"""RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.layout import EVERYWHERE, local


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    layout = EVERYWHERE

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]; the mean square is taken in fp32 whatever the format of x."""
        return F.rms_norm(x, self.weight.shape, local(self.weight), self.epsilon)
