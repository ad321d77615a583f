"""Initial weights as a pure function of (seed, parameter name, place): the same under every layout.

Each rank draws its own part only (model/draws.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.decoder import Decoder, unpadded
from megalaunch.engine.model.draws import Range, draw_normal
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.placement import local_values, own_part

# Projections that write into the residual stream; their spread shrinks with depth (GPT-2, Megatron).
_RESIDUAL_WRITERS = ("attention.o_proj.weight", "mlp.down_proj.weight")
_EMBEDDINGS = ("embedding.weight", "embedding.positions")
_SINKS = ".sinks"


def initial_value(name: str, shape: torch.Size, config: DecoderConfig, seed: int) -> Tensor:
    """The global fp32 tensor of one parameter: zeros for biases, norms that change nothing, else a normal draw."""
    whole = torch.empty(shape)
    _fill_initial(whole, [(0, size) for size in shape], name, shape, config, seed)
    return whole


@torch.no_grad()
def initialise(model: Decoder | ModelParts, seed: int) -> None:
    """Fill every parameter of a model that has memory, sharded or not."""
    for name, parameter in model.named_parameters():
        shape = unpadded(name, parameter.shape, model.config.vocab_size)
        own, part = local_values(parameter), own_part(parameter)
        (first, count), *rest = part
        drawn = max(0, min(count, shape[0] - first))  # rows that pad a vocabulary are zeros
        own[drawn:].zero_()
        _fill_initial(own[:drawn], [(first, drawn), *rest], name, shape, model.config, seed)


def _fill_initial(
    own: Tensor, part: Sequence[Range], name: str, shape: torch.Size, config: DecoderConfig, seed: int
) -> None:
    if len(shape) == 1 and not name.endswith(_SINKS):
        own.fill_(0.0 if name.endswith(".bias") or config.norm.plus_one else 1.0)
        return
    std = config.embedding_init_std if name in _EMBEDDINGS else config.init_std
    if name.endswith(_RESIDUAL_WRITERS):
        std /= math.sqrt(2 * config.num_layers)
    draw_normal(own, part, shape, f"{seed}:{name}", std)
