"""torch.compile per layer: layers of one kind share a graph, and the hooks of `fully_shard` stay outside of it."""

from __future__ import annotations

import torch

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.moe.moe_layer import MoELayer

BACKEND = "inductor"


def compile_layers(model: Decoder) -> None:
    """Compile every layer, in place, after activation checkpointing and before `fully_shard`.

    Compilation happens in the first step, which may take minutes. Mixtures of experts stay outside of the graphs: the
    rows of an expert change with every microbatch, and its load is counted on the side.
    """
    for layer in model.all_layers.values():
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.save_policy = torch.compiler.disable(layer.mlp.save_policy)  # type: ignore[no-untyped-call]
        layer.compile(backend=BACKEND)
