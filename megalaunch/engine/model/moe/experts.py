"""The routed experts: feed-forward blocks of one shape, computed by grouped matmuls.

Shapes: R rows in the order of their experts, E experts, H hidden, F a block's width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalaunch.engine.model.config import MLPConfig
from megalaunch.engine.model.layers import SavePolicy, save_activations
from megalaunch.engine.model.mlp import apply_activation
from megalaunch.engine.param_layout import EXPERT_COLUMN, EXPERT_ROW, EXPERT_ROW_BIAS, ParamLayout, local_param
from megalaunch.kernels.grouped_linear import GROUPED_COMPUTE_DTYPE, GroupedMatmuls, grouped_linear_by
from megalaunch.kernels.overridable import overridable
from megalaunch.schema.model import GATED


class GroupedLinear(nn.Module):
    """x -> x W_e^T (+ b_e) for the expert e of each row; `weight` is [E, out, in].

    `matmuls` computes its products, in fp8 for instance.
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, layout: ParamLayout, bias: bool = False
    ) -> None:
        super().__init__()
        self.layout = layout
        self.matmuls: GroupedMatmuls = GROUPED_COMPUTE_DTYPE
        self.bias_layout = EXPERT_ROW_BIAS if layout is EXPERT_ROW else layout
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(num_experts, out_features)) if bias else None

    def forward(self, x_RH: Tensor, offsets_E: Tensor) -> Tensor:
        """Apply the layer, [R, in] -> [R, out]; the rows of expert e end before offsets[e]."""
        bias = None if self.bias is None else local_param(self.bias)
        return grouped_linear_by(self.matmuls, x_RH, local_param(self.weight), offsets_E, bias)


@overridable
class Experts(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x), up(x))), with the weights of each row's expert."""

    recompute_activation = False
    """If True, the activation is recomputed, perhaps after its own backward, which must not overwrite its inputs."""

    def __init__(self, num_experts: int, hidden_size: int, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_save_policy: SavePolicy = save_activations
        width, bias = config.width, config.bias
        gated = config.activation in GATED
        self.gate_proj = GroupedLinear(num_experts, hidden_size, width, EXPERT_COLUMN, bias) if gated else None
        self.up_proj = GroupedLinear(num_experts, hidden_size, width, EXPERT_COLUMN, bias)
        self.down_proj = GroupedLinear(num_experts, width, hidden_size, EXPERT_ROW, bias)

    @property
    def projections(self) -> tuple[GroupedLinear, ...]:
        """Gate, if there is one, up, and down."""
        return (*(() if self.gate_proj is None else (self.gate_proj,)), self.up_proj, self.down_proj)

    def forward(self, x_RH: Tensor, offsets_E: Tensor) -> Tensor:
        """Apply the experts, [R, H] -> [R, H]; rows past the last offset are undefined."""
        return self.feed_forward(x_RH, partial(_project, offsets_E))

    def feed_forward(self, x_RH: Tensor, project: Callable[[GroupedLinear, Tensor], Tensor]) -> Tensor:
        """Apply the experts, [R, H] -> [R, H]; `project` applies a projection to rows."""
        *entries, down = self.projections
        activated_RF = self.activation_save_policy(self.activation, *(project(entry, x_RH) for entry in entries))
        return project(down, activated_RF)

    @overridable
    def activation(self, *entered: Tensor) -> Tensor:
        """Apply the activation to up, or to gate and up."""
        return apply_activation(self.config, entered, overwrite_up=not self.recompute_activation)


def _project(offsets_E: Tensor, projection: GroupedLinear, x_RH: Tensor) -> Tensor:
    y_RF: Tensor = projection(x_RH, offsets_E)
    return y_RF
