"""Norm over the features of all heads, which are sharded over tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.model.norm import Norm
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.param_layout import ParamLayout


class ShardedRMSNorm(Norm):
    """RMSNorm, or LayerNorm, inside a tensor-parallel region.

    Every rank has an equal shard of the features, so that the mean over all features is the mean of the ranks' means:
    one all-reduce of [B, S, 1] for the variance, and one for the mean of a LayerNorm.
    """

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout, tp_region: TPRegion) -> None:
        super().__init__(size, config, layout)
        self.tp_region = tp_region

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, S, f] -> [B, S, f], computed in fp32."""
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
