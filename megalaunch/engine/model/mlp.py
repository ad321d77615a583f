"""The feed-forward block, gated or not."""

from __future__ import annotations

from torch import Tensor, nn

from megalaunch.engine.model.activation import GATED, PLAIN, apply_gated_activation
from megalaunch.engine.model.config import MLPConfig
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.engine.param_layout import COLUMN_PARALLEL, ROW_PARALLEL


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x), up(x)))."""

    recompute_activation = False
    """If True, the activation is recomputed, perhaps after its own backward, which must not overwrite its inputs."""

    def __init__(self, hidden_size: int, config: MLPConfig, tp_region: TPRegion = NO_TP) -> None:
        super().__init__()
        self.config, self.tp_region = config, tp_region
        width, bias = config.width, config.bias
        self.gate_proj = Linear(hidden_size, width, COLUMN_PARALLEL, bias) if config.activation in GATED else None
        self.up_proj = Linear(hidden_size, width, COLUMN_PARALLEL, bias)
        self.down_proj = Linear(width, hidden_size, ROW_PARALLEL, bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Apply the block, [B, s, H] -> [B, s, H]."""
        entries = (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)
        return self.tp_region.row_parallel_linear(
            self.activation(*self.tp_region.column_parallel_linear(x_BSH, *entries)), self.down_proj
        )

    def activation(self, *entered: Tensor) -> Tensor:
        """Apply the activation to up, or to gate and up, which may be clamped (gpt-oss: the gate from above only)."""
        if self.gate_proj is None:
            (up,) = entered
            return PLAIN[self.config.activation](up)
        gate, up = entered
        if self.config.clamp is not None:
            gate, up = gate.clamp(max=self.config.clamp), up.clamp(-self.config.clamp, self.config.clamp)
        return apply_gated_activation(self.config.activation, gate, up, overwrite_up=not self.recompute_activation)
