"""The feed-forward block, with a gate beside its up projection or without."""

from __future__ import annotations

from torch import Tensor, nn

from megalaunch.engine.layout import COLUMNS, ROWS
from megalaunch.engine.model.activation import GATED, PLAIN, gated
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.config import MLPConfig
from megalaunch.engine.model.linear import Linear


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x), up(x)))."""

    makes_again = False  # the activation's output, for a backward pass that comes later than the activation's own

    def __init__(self, hidden_size: int, config: MLPConfig, boundary: Boundary = ONE_DEVICE) -> None:
        super().__init__()
        self.config, self.boundary = config, boundary
        width, bias = config.width, config.bias
        self.gate_proj = Linear(hidden_size, width, COLUMNS, bias) if config.activation in GATED else None
        self.up_proj = Linear(hidden_size, width, COLUMNS, bias)
        self.down_proj = Linear(width, hidden_size, ROWS, bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        entries = (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)
        return self.boundary.leave(self.activate(*self.boundary.enter(x_BSH, *entries)), self.down_proj)

    def activate(self, *entered: Tensor) -> Tensor:
        """Of up alone, or of gate and up, which may be clamped (gpt-oss: the gate from above only)."""
        if self.gate_proj is None:
            (up,) = entered
            return PLAIN[self.config.activation](up)
        gate, up = entered
        if self.config.clamp is not None:
            gate, up = gate.clamp(max=self.config.clamp), up.clamp(-self.config.clamp, self.config.clamp)
        return gated(self.config.activation, gate, up, spend=not self.makes_again)
