"""torch.compile per layer: layers of one kind share a graph, and the hooks of `fully_shard` stay outside of it."""

from __future__ import annotations

from megalaunch.engine.model.decoder import Decoder

BACKEND = "inductor"


def compile_layers(model: Decoder) -> None:
    """Compile every layer, in place, after activation checkpointing and before `fully_shard`.

    Compilation happens in the first step, which may take minutes.
    """
    for layer in model.all_layers.values():
        layer.compile(backend=BACKEND)
