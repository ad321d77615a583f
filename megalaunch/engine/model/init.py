"""Initial weights as a pure function of (seed, parameter name, index): the same under every layout.

Each rank draws only its own shard (model/counter_rng.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalaunch.engine.dtensor import local_slice, to_local_no_grad
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.counter_rng import Range, fill_normal
from megalaunch.engine.model.decoder import Decoder, strip_vocab_padding
from megalaunch.engine.model.model_parts import ModelParts

# Projections that add to the residual stream: std is divided by sqrt(2 * num_layers) (GPT-2, Megatron).
_RESIDUAL_WRITERS = ("attention.o_proj.weight", "mlp.down_proj.weight", "experts.down_proj.weight")
_EMBEDDINGS = ("embedding.weight", "embedding.positions")
_SINKS = ".sinks"


def init_value(name: str, shape: torch.Size, config: DecoderConfig, seed: int) -> Tensor:
    """Return the global fp32 tensor of a parameter: 0 for biases, a scale of 1 for norms, else normal numbers."""
    parameter = torch.empty(shape)
    _init_parameter(parameter, [(0, size) for size in shape], name, shape, config, seed)
    return parameter


@torch.no_grad()
def init_weights(model: Decoder | ModelParts, seed: int) -> None:
    """Initialise every parameter of a model in place, sharded or not. The model must be off the meta device."""
    for name, parameter in model.named_parameters():
        shape = strip_vocab_padding(name, parameter.shape, model.config.vocab_size)
        own, part = to_local_no_grad(parameter), local_slice(parameter)
        (first, count), *rest = part
        drawn = max(0, min(count, shape[0] - first))  # the vocabulary's padding rows are zeros
        own[drawn:].zero_()
        _init_parameter(own[:drawn], [(first, drawn), *rest], name, shape, model.config, seed)


def _init_parameter(
    own: Tensor, part: Sequence[Range], name: str, shape: torch.Size, config: DecoderConfig, seed: int
) -> None:
    is_bias = name.endswith(".bias")  # of experts: [E, F]
    if is_bias or (len(shape) == 1 and not name.endswith(_SINKS)):
        own.fill_(0.0 if is_bias or config.norm.zero_centered_gamma else 1.0)
        return
    std = config.embedding_init_std if name in _EMBEDDINGS else config.init_std
    if name.endswith(_RESIDUAL_WRITERS):
        std /= math.sqrt(2 * config.num_layers)
    fill_normal(own, part, shape, f"{seed}:{name}", std)
