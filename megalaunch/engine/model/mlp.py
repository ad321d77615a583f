"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor, nn

from megalaunch.engine.layout import COLUMNS, ROWS
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.linear import Linear
from megalaunch.kernels.swiglu import swiglu


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, boundary: Boundary = ONE_DEVICE) -> None:
        super().__init__()
        self.boundary = boundary
        self.gate_proj = Linear(hidden_size, ffn_hidden_size, COLUMNS)
        self.up_proj = Linear(hidden_size, ffn_hidden_size, COLUMNS)
        self.down_proj = Linear(ffn_hidden_size, hidden_size, ROWS)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        gate, up = self.boundary.enter(x_BSH, self.gate_proj, self.up_proj)
        return self.boundary.leave(self.activate(gate, up), self.down_proj)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return swiglu(gate, up)
