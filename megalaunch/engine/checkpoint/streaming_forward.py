"""A forward pass that holds one tensor at a time, to compare two sets of weights of any size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.checkpoint.load_tensors import Read
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.layers import Embedding
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.moe.experts import GroupedLinear
from megalaunch.schema.model import ModelSpec

_PIECE_VALUES = 1 << 24  # values of a matrix converted to fp32 at a time: 64 MiB in addition to the stored matrix


@torch.no_grad()
def streamed_logits(model: ModelSpec, read: Read, tokens_BS: Tensor) -> Tensor:
    """Compute logits [B, S, V] in fp32. Each tensor, of experts each one's, is read when needed and freed after use."""
    with torch.device("meta"):
        decoder = build_decoder(model).eval()
    embedding, head = decoder.embedding, decoder.head
    assert embedding is not None
    for path, module in list(decoder.named_modules()):
        prefix = "embedding." if module is head and model.tie_word_embeddings else f"{path}."
        if isinstance(module, Linear):
            decoder.set_submodule(path, _StreamedLinear(prefix, read, biased=module.bias is not None))
        elif isinstance(module, GroupedLinear):
            width, biased = module.weight.shape[1], module.bias is not None
            decoder.set_submodule(path, _StreamedGroupedLinear(prefix, width, read, biased))
        elif module is not embedding and any(True for _ in module.parameters(recurse=False)):
            _load_vectors_on_demand(module, prefix, read)
    logits: Tensor = decoder(_lookup_rows(embedding, read, tokens_BS))
    return logits


def _lookup_rows(embedding: Embedding, read: Read, tokens_BS: Tensor) -> Tensor:
    """Load only the embedding rows of these tokens; return the tokens renumbered to index them, [B, S]."""
    used_tokens, numbers_BS = torch.unique(tokens_BS, return_inverse=True)
    _set_param(embedding, "weight", read("embedding.weight")[used_tokens])
    if embedding.positions is not None:
        _set_param(embedding, "positions", read("embedding.positions"))
    return numbers_BS


class _StreamedLinear(nn.Module):
    """x W^T (+ b), in place of a `Linear`: reads W on every call and multiplies it in row chunks."""

    def __init__(self, prefix: str, read: Read, biased: bool) -> None:
        super().__init__()
        self._prefix, self._read, self._biased = prefix, read, biased

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, [..., in] -> [..., out]."""
        product = _linear_in_pieces(x, self._read(f"{self._prefix}weight"))
        return product + self._read(f"{self._prefix}bias").float() if self._biased else product


def _linear_in_pieces(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in fp32, [..., in] -> [..., out]; W of any dtype is converted by a part of its rows at a time."""
    rows = max(1, _PIECE_VALUES // weight.shape[1])
    return torch.cat([F.linear(x, piece.float()) for piece in torch.split(weight, rows)], dim=-1)


class _StreamedGroupedLinear(nn.Module):
    """x W_e^T (+ b_e), in place of a `GroupedLinear`: reads and converts one expert at a time."""

    def __init__(self, prefix: str, width: int, read: Read, biased: bool) -> None:
        super().__init__()
        self._prefix, self._width, self._read, self._biased = prefix, width, read, biased

    def forward(self, x_RH: Tensor, offsets_E: Tensor) -> Tensor:
        """Apply the layer, [R, in] -> [R, out]; the rows of expert e end before offsets[e]."""
        ends = offsets_E.tolist()
        y_RF = x_RH.new_zeros(x_RH.shape[0], self._width)
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < end:
                y_RF[start:end] = _linear_in_pieces(x_RH[start:end], self._read(f"{self._prefix}weight", expert))
                if self._biased:
                    y_RF[start:end] += self._read(f"{self._prefix}bias", expert).float()
        return y_RF


def _load_vectors_on_demand(module: nn.Module, prefix: str, read: Read) -> None:
    """Load a module's own parameters and buffers (norms, attention sinks, routers) before each forward."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    buffers = [name for name, _ in module.named_buffers(recurse=False)]

    def before(module: nn.Module, inputs: Any) -> None:
        for name in names:
            _set_param(module, name, read(prefix + name))
        for name in buffers:
            setattr(module, name, read(prefix + name).float())

    module.register_forward_pre_hook(before)


def _set_param(module: nn.Module, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value.float(), requires_grad=False))
