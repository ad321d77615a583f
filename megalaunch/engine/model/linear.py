"""A matrix multiplication whose weight and bias know how they lie over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalaunch.engine.model.matmul import linear
from megalaunch.engine.param_layout import REPLICATED, ParamLayout, local_param


class Linear(nn.Module):
    """x -> x W^T (+ b); `weight` is [out, in] as in torch.

    The bias is divided with the outputs; where the inputs are, every rank adds all of it to the sum.
    """

    def __init__(self, in_features: int, out_features: int, layout: ParamLayout, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.layout = layout
        self.bias_layout = layout if layout.shard_dim == 0 else REPLICATED

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], where one device holds all."""
        return linear(x, local_param(self.weight), None if self.bias is None else local_param(self.bias))
