"""A norm over all heads together, which tensor-parallel ranks divide: their statistics are averaged."""

from __future__ import annotations

from torch import Tensor

from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.model.norm import Norm
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.param_layout import ParamLayout


class ShardedRMSNorm(Norm):
    """A norm inside a tensor-parallel region: every rank has as many of the features as any other."""

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout, tp_region: TPRegion) -> None:
        super().__init__(size, config, layout)
        self.tp_region = tp_region

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, f] -> [B, S, f], in fp32 inside."""
        wide = x.float()
        if self.config.layer:
            wide = wide - self.tp_region.all_reduce_mean(wide.mean(-1, keepdim=True))
        variance = self.tp_region.all_reduce_mean(wide.square().mean(-1, keepdim=True))
        weight = self.tp_region.local_param(self.weight, self.layout)
        normed = (
            wide
            * (variance + self.config.epsilon).rsqrt()
            * (weight + 1 if self.config.zero_centered_gamma else weight)
        )
        return (normed if self.bias is None else normed + self.tp_region.local_param(self.bias, self.layout)).to(
            x.dtype
        )
