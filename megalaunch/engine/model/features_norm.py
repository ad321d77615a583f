"""A norm over all heads together, which tensor-parallel ranks divide: their statistics are averaged."""

from __future__ import annotations

from torch import Tensor

from megalaunch.engine.layout import ParamLayout
from megalaunch.engine.model.boundary import Boundary
from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.model.norm import Norm


class FeaturesNorm(Norm):
    """A norm inside a tensor-parallel region: every rank has as many of the features as any other."""

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout, boundary: Boundary) -> None:
        super().__init__(size, config, layout)
        self.boundary = boundary

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, f] -> [B, S, f], in fp32 inside."""
        wide = x.float()
        if self.config.layer:
            wide = wide - self.boundary.average(wide.mean(-1, keepdim=True))
        variance = self.boundary.average(wide.square().mean(-1, keepdim=True))
        weight = self.boundary.part(self.weight, self.layout)
        normed = wide * (variance + self.config.epsilon).rsqrt() * (weight + 1 if self.config.plus_one else weight)
        return (normed if self.bias is None else normed + self.boundary.part(self.bias, self.layout)).to(x.dtype)
