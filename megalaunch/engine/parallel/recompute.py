"""Activations that are computed again in the backward pass: whole layers, or some of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megalaunch.config.schema.recompute import RecomputeModule, RecomputeSpec
from megalaunch.engine.model.decoder import Decoder, DecoderLayer
from megalaunch.engine.model.norm import Norm

# Which function of which module each word of recompute.modules means.
_PARTS: dict[RecomputeModule, Callable[[DecoderLayer], Iterator[tuple[nn.Module, str]]]] = {
    "attention": lambda layer: iter([(layer.attention, "core")]),
    "norm": lambda layer: ((module, "forward") for module in layer.modules() if isinstance(module, Norm)),
    "mlp": lambda layer: iter([(layer.mlp, "forward")]),
    "activation": lambda layer: iter([(layer.mlp, "activate")]),
}


def recompute(model: Decoder, settings: RecomputeSpec) -> None:
    """Have the chosen parts of a model computed again, in place; before `fully_shard`, whose hooks stay outside."""
    layers = list(model.layers.values())
    if settings.granularity == "full":
        chosen = layers if settings.method == "uniform" else layers[: settings.num_layers]
        for layer in chosen:
            _again(layer, "forward")
    elif settings.granularity == "selective":
        for layer in layers:
            assert isinstance(layer, DecoderLayer)
            for word in settings.modules:
                for module, function in _PARTS[word](layer):
                    _again(module, function)


def _again(module: nn.Module, function: str) -> None:
    """Nothing random happens inside, so no state of random generators is kept."""
    original: Callable[..., Any] = getattr(module, function)
    setattr(module, function, partial(checkpoint, original, use_reentrant=False, preserve_rng_state=False))
