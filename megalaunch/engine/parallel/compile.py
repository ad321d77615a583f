"""Layers compiled one by one: all of a kind share a graph, and what `fully_shard` hooks on stays outside."""

from __future__ import annotations

from megalaunch.engine.model.decoder import Decoder

BACKEND = "inductor"


def compile_layers(model: Decoder) -> None:
    """In place, after `recompute` and before `fully_shard`. The first step compiles, and may take minutes."""
    for layer in model.layers.values():
        layer.compile(backend=BACKEND)
