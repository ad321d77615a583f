"""Initialise a model: each rank draws only its own shard (model/counter_rng.py)."""

from __future__ import annotations

import torch

from megalaunch.engine.dtensor import local_slice, to_local_no_grad
from megalaunch.engine.model.decoder import Decoder, strip_vocab_padding
from megalaunch.engine.model.init_value import init_slice
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.param_init import declared_inits


@torch.no_grad()
def init_weights(model: Decoder | ModelParts, seed: int) -> None:
    """Initialise every parameter of a model in place, sharded or not. Collective over pipeline stages.

    The values do not depend on the layout. The model must be off the meta device.
    """
    parts = model.parts if isinstance(model, ModelParts) else (model,)
    declared = {name: init for part in parts for name, init in declared_inits(part).items()}
    for name, parameter in model.named_parameters():
        shape = strip_vocab_padding(name, parameter.shape, model.config.vocab_size)
        own, part = to_local_no_grad(parameter), local_slice(parameter)
        (first, count), *rest = part
        drawn = max(0, min(count, shape[0] - first))  # the vocabulary's padding rows are zeros
        own[drawn:].zero_()
        init_slice(own[:drawn], [(first, drawn), *rest], name, shape, model.config, seed, declared.get(name))
    if isinstance(model, ModelParts):
        model.copy_embedding()
