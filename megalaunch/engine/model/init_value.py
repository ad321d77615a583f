"""Initial weights of one parameter as a pure function of (seed, parameter name, index): the same under every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.counter_rng import Range, fill_normal
from megalaunch.engine.model.param_init import ParamInit

# Projections that add to the residual stream: std is divided by sqrt(2 * num_layers) (GPT-2, Megatron).
_RESIDUAL_WRITERS = ("attention.o_proj.weight", "mlp.down_proj.weight", "experts.down_proj.weight")
_EMBEDDINGS = ("embedding.weight", "embedding.positions")
_SINKS = ".sinks"


def init_value(name: str, shape: torch.Size, config: DecoderConfig, seed: int) -> Tensor:
    """Return the global fp32 tensor of a parameter: 0 for biases, a scale of 1 for norms, else normal numbers."""
    parameter = torch.empty(shape)
    init_slice(parameter, [(0, size) for size in shape], name, shape, config, seed)
    return parameter


def init_slice(
    own: Tensor,
    part: Sequence[Range],
    name: str,
    shape: torch.Size,
    config: DecoderConfig,
    seed: int,
    declared: ParamInit | None = None,
) -> None:
    """Initialise a slice of a parameter in place.

    Args:
        own: The slice.
        part: Its first index and size in each dim.
        name: Name of the parameter.
        shape: Global shape of the parameter.
        config: Of the model.
        seed: `train.seed`.
        declared: What the parameter's module declares; None: the rule of the decoder's own parameters.
    """
    if declared is not None:
        if declared.std:
            fill_normal(own, part, shape, f"{seed}:{name}", declared.std)
            own += declared.mean
        else:
            own.fill_(declared.mean)
        return
    is_bias = name.endswith(".bias")  # of experts: [E, F]
    if is_bias or (len(shape) == 1 and not name.endswith(_SINKS)):
        own.fill_(0.0 if is_bias or config.norm.zero_centered_gamma else 1.0)
        return
    std = config.embedding_init_std if name in _EMBEDDINGS else config.init_std
    if name.endswith(_RESIDUAL_WRITERS):
        std /= math.sqrt(2 * config.num_layers)
    fill_normal(own, part, shape, f"{seed}:{name}", std)
