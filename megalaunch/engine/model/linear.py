"""A matrix multiplication whose weight knows how it lies over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.layout import ParamLayout, local


class Linear(nn.Module):
    """x -> x W^T, without bias; `weight` is [out, in] as in torch."""

    def __init__(self, in_features: int, out_features: int, layout: ParamLayout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], where one device holds the whole weight."""
        return F.linear(x, local(self.weight))
