"""A step's load of experts over all ranks: collected from this rank's layers, and used to update the expert biases."""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.moe.load import SUMS, expert_counts
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.schema.moe import MoESpec


def moe_layers(model: ModelParts) -> dict[int, MoELayer]:
    """Return this rank's layers with experts, by their number among all layers with experts, MTP depths last."""
    numbers = {index: number for number, index in enumerate(_layers_with_experts(model))}
    found: dict[int, MoELayer] = {}
    for part in model.parts:
        for name, layer in part.all_layers.items():
            if isinstance(layer.mlp, MoELayer):
                found[numbers[int(name)]] = layer.mlp
    return found


def take_expert_sums(model: ModelParts, device: torch.device) -> Tensor | None:
    """Return this rank's sums of all layers with experts, fp64 [L, E + 3], and reset them; None for a dense model."""
    config = model.config.moe
    if config is None:
        return None
    layers = moe_layers(model)
    empty = torch.zeros(config.num_experts + SUMS, dtype=torch.float64, device=device)
    total = len(_layers_with_experts(model))
    return torch.stack([layers[n].router.load.take(device) if n in layers else empty for n in range(total)])


@torch.no_grad()
def update_expert_biases(model: ModelParts, sums_LE: Tensor, moe: MoESpec) -> None:
    """Raise the bias of each expert below the mean load by `balance_bias_rate`, and lower that of each one above.

    Aux-loss-free balancing (Wang et al. 2024; DeepSeek-V3 report, section 2.1.2), from the tokens of the whole step.
    """
    for number, layer in moe_layers(model).items():
        bias_E = layer.router.expert_bias
        if bias_E is not None:
            counts_E = expert_counts(sums_LE)[number].to(bias_E.device)
            bias_E += moe.balance_bias_rate * (counts_E.mean() - counts_E).sign().to(bias_E.dtype)


def _layers_with_experts(model: ModelParts) -> list[int]:
    return [index for index, layer in enumerate(model.config.all_layers) if layer.experts]
