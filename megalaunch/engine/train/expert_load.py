"""A step's load of experts over all ranks: collected from this rank's layers, and used to update the routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.moe.load import best_counts, expert_counts, num_sums
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.schema.moe import MoESpec


def moe_layers(model: ModelParts) -> dict[int, MoELayer]:
    """Return this rank's layers with experts, by their number among all layers with experts, MTP depths last."""
    numbers = {index: number for number, index in enumerate(model.config.expert_layers)}
    return {numbers[int(name)]: block for name, block in _moe_blocks(model)}


def take_expert_sums(model: ModelParts, device: torch.device) -> Tensor | None:
    """Return this rank's sums of all layers with experts, fp64 [L, 2 E + 4], and reset them; None for a dense model."""
    config = model.config.moe
    if config is None:
        return None
    layers = moe_layers(model)
    empty = torch.zeros(num_sums(config.num_experts), dtype=torch.float64, device=device)
    total = len(model.config.expert_layers)
    return torch.stack([layers[n].router.load.take(device) if n in layers else empty for n in range(total)])


def router_states(model: ModelParts) -> Mapping[str, Tensor]:
    """Return what this rank's routers know of the step before, for checkpoints: global tensors by name."""
    loads = {name: layer.router.previous_load_E for name, layer in _moe_blocks(model)}
    return {f"router.layers.{name}.previous_load": load_E for name, load_E in loads.items() if load_E is not None}


def first_non_finite_router(model: ModelParts) -> int | None:
    """Return this rank's first layer whose router had logits that are not finite in the last step; None if all were."""
    bad = [int(name) for name, layer in _moe_blocks(model) if not layer.router.load.is_finite()]
    return min(bad, default=None)


@torch.no_grad()
def update_routers(model: ModelParts, sums_LE: Tensor, moe: MoESpec) -> None:
    """Update the expert biases and the load of the step before, from the tokens of the whole step.

    Aux-loss-free balancing raises the bias of each expert below the mean load by `balance_bias_rate`, and lowers that
    of each one above (Wang et al. 2024; DeepSeek-V3 report, section 2.1.2).
    """
    for number, layer in moe_layers(model).items():
        bias_E, previous_E = layer.router.expert_bias, layer.router.previous_load_E
        if bias_E is not None:
            counts_E = expert_counts(sums_LE)[number].to(bias_E.device)
            bias_E += moe.balance_bias_rate * (counts_E.mean() - counts_E).sign().to(bias_E.dtype)
        if previous_E is not None:
            best_E = best_counts(sums_LE)[number].to(previous_E.device)
            previous_E.copy_(best_E / best_E.sum())


def _moe_blocks(model: ModelParts) -> Iterator[tuple[str, MoELayer]]:
    """Yield this rank's layers with experts, by their names."""
    for part in model.parts:
        for name, layer in part.all_layers.items():
            if layer.moe_layer is not None:
                yield name, layer.moe_layer
