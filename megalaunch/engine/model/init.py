"""Initial weights as a pure function of (seed, parameter name): the same under every layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.decoder import Decoder, unpadded
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.placement import fill

# Projections that write into the residual stream; their spread shrinks with depth (GPT-2, Megatron).
_RESIDUAL_WRITERS = ("attention.o_proj.weight", "mlp.down_proj.weight")
_EMBEDDINGS = ("embedding.weight", "embedding.positions")
_SINKS = ".sinks"


def initial_value(name: str, shape: torch.Size, config: DecoderConfig, seed: int) -> Tensor:
    """The global fp32 tensor of one parameter: zeros for biases, norms that change nothing, else a normal draw."""
    if len(shape) == 1 and not name.endswith(_SINKS):
        return torch.zeros(shape) if name.endswith(".bias") or config.norm.plus_one else torch.ones(shape)
    std = config.embedding_init_std if name in _EMBEDDINGS else config.init_std
    if name.endswith(_RESIDUAL_WRITERS):
        std /= math.sqrt(2 * config.num_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(model: Decoder | ModelParts, seed: int) -> None:
    """Fill every parameter of a model that has memory, sharded or not."""
    for name, parameter in model.named_parameters():
        shape = unpadded(name, parameter.shape, model.config.vocab_size)
        value = initial_value(name, shape, model.config, seed).to(parameter.dtype)
        fill(parameter, value)
