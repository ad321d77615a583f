"""A forward pass that holds one layer at a time: how two sets of weights of any size are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.families.registry import build_decoder

Read = Callable[[str], Tensor]
"""A parameter by its name in the decoder."""


@torch.no_grad()
def streamed_logits(model: ModelSpec, read: Read, tokens_BS: Tensor) -> Tensor:
    """Logits [B, S, V] in fp32; each part's weights are read when its turn comes, and dropped after it."""
    with torch.device("meta"):
        decoder = build_decoder(model).eval()
    embedding, norm, head = decoder.embedding, decoder.norm, decoder.head
    assert embedding is not None
    assert norm is not None
    assert head is not None
    _fill(embedding, "embedding.", read)
    for name, layer in decoder.layers.items():
        _hold_in_turn(layer, f"layers.{name}.", read)
    _hold_in_turn(norm, "norm.", read)
    _hold_in_turn(head, "embedding." if model.tied_embeddings else "head.", read)
    first = next(iter(decoder.layers.values()))
    first.register_forward_pre_hook(lambda module, inputs: _forget(embedding))
    logits: Tensor = decoder(tokens_BS)
    return logits


def _hold_in_turn(module: nn.Module, prefix: str, read: Read) -> None:
    def before(module: nn.Module, inputs: Any) -> None:
        _fill(module, prefix, read)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        _forget(module)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _fill(module: nn.Module, prefix: str, read: Read) -> None:
    values = {name: read(prefix + name).float() for name, _ in module.named_parameters()}
    module.load_state_dict(values, assign=True)


def _forget(module: nn.Module) -> None:
    module.load_state_dict(
        {name: torch.empty_like(p, device="meta") for name, p in module.named_parameters()}, assign=True
    )
