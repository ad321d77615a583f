"""torch.compile per layer: layers of one kind share a graph, and the hooks of `fully_shard` stay outside of it."""

from __future__ import annotations

import torch

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.decoder_layer import DecoderLayer

BACKEND = "inductor"


def compile_layers(model: Decoder, eager_attention: bool) -> None:
    """Compile every layer, in place, after activation checkpointing and before `fully_shard`.

    Compilation happens in the first step, which may take minutes. Mixtures of experts stay outside of the graphs: the
    rows of an expert change with every microbatch, and its load is counted on the side.

    Args:
        model: The decoder.
        eager_attention: Leave core attention out of the graphs: a compiler would unroll its blocks, which fused kernels
            compute, and compile anew for other documents.
    """
    for layer in model.all_layers.values():
        if (moe := layer.moe_layer) is not None:
            moe.save_policy = torch.compiler.disable(moe.save_policy)  # type: ignore[no-untyped-call]
        if eager_attention and isinstance(layer, DecoderLayer):
            policy = layer.attention.core_save_policy
            layer.attention.core_save_policy = torch.compiler.disable(policy)  # type: ignore[no-untyped-call]
        layer.compile(backend=BACKEND)
