"""The feed-forward block, gated or not, and its activation functions by their names in `model.activation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.model.config import MLPConfig
from megalaunch.engine.model.layers import SavePolicy, save_activations
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.engine.param_layout import COLUMN_PARALLEL, ROW_PARALLEL
from megalaunch.kernels.geglu import geglu, quick_gelu
from megalaunch.kernels.overridable import overridable
from megalaunch.kernels.swiglu import swiglu
from megalaunch.schema.model import GATED, Activation


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation of Hendrycks and Gimpel, as in GPT-2."""
    return F.gelu(x, approximate="tanh")


_UNGATED_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
_GATED_ACTIVATIONS: Mapping[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": partial(geglu, variant="geglu_tanh"),
    "quick_geglu": partial(geglu, variant="quick_geglu"),
}
"""Gated activations: (gate, up) -> input of the down projection (Shazeer, 2020)."""


def apply_gated_activation(activation: Activation, gate: Tensor, up: Tensor, *, overwrite_up: bool) -> Tensor:
    """Apply a gated activation; `overwrite_up`: its backward may overwrite `up` (kernels/swiglu.py)."""
    return (
        swiglu(gate, up, overwrite_up=overwrite_up)
        if activation == "swiglu"
        else _GATED_ACTIVATIONS[activation](gate, up)
    )


def apply_activation(config: MLPConfig, entered: Sequence[Tensor], *, overwrite_up: bool) -> Tensor:
    """Apply a block's activation to (up,), or to (gate, up), which may be clamped (gpt-oss: the gate from above only).

    `overwrite_up` is `apply_gated_activation`'s.
    """
    if config.activation not in GATED:
        (up,) = entered
        return _UNGATED_ACTIVATIONS[config.activation](up)
    gate, up = entered
    if config.clamp is not None:
        gate, up = gate.clamp(max=config.clamp), up.clamp(-config.clamp, config.clamp)
    return apply_gated_activation(config.activation, gate, up, overwrite_up=overwrite_up)


@overridable
class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x), up(x)))."""

    recompute_activation = False
    """If True, the activation is recomputed, perhaps after its own backward, which must not overwrite its inputs."""

    def __init__(self, hidden_size: int, config: MLPConfig, tp_region: TPRegion = NO_TP) -> None:
        super().__init__()
        self.config, self.tp_region = config, tp_region
        self.save_policy: SavePolicy = save_activations
        self.activation_save_policy: SavePolicy = save_activations
        width, bias = config.width, config.bias
        self.gate_proj = Linear(hidden_size, width, COLUMN_PARALLEL, bias) if config.activation in GATED else None
        self.up_proj = Linear(hidden_size, width, COLUMN_PARALLEL, bias)
        self.down_proj = Linear(width, hidden_size, ROW_PARALLEL, bias)

    @property
    def projection_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """The projections, those that share an input as one group (`ProjectionBlock`)."""
        entries = (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)
        return entries, (self.down_proj,)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Apply the block, [B, s, H] -> [B, s, H]."""
        return self.save_policy(self.feed_forward, x_BSH)

    def feed_forward(self, x_BSH: Tensor) -> Tensor:
        """Apply the block, as a function that the save policy may call again."""
        return self.project_down(self.activate(x_BSH))

    def activate(self, x_BSH: Tensor) -> Tensor:
        """Apply the first half of the block: all before the down projection."""
        entries, _ = self.projection_groups
        return self.activation_save_policy(self.activation, *self.tp_region.column_parallel_linear(x_BSH, *entries))

    def project_down(self, activated: Tensor) -> Tensor:
        """Apply the second half of the block."""
        return self.tp_region.row_parallel_linear(activated, self.down_proj)

    @overridable
    def activation(self, *entered: Tensor) -> Tensor:
        """Apply the activation to up, or to gate and up."""
        return apply_activation(self.config, entered, overwrite_up=not self.recompute_activation)
