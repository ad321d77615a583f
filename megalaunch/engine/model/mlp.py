"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor, nn

from megalaunch.kernels.swiglu import swiglu


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.down_proj(swiglu(self.gate_proj(x_BSH), self.up_proj(x_BSH)))
