"""Layers of Transformer Engine that allocate what it does, and compute nothing: for simulated steps.

As docs/precision.md describes it: it casts inputs and gradients of outputs to 8 bits in both layouts, saves one of an
input's, gathers in 8 bits, and holds each weight in both. Scales of blocks lie beside the values: a byte for 32 with
mxfp8, 4 bytes for 128 of an activation with blockwise. No GPU has confirmed that here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine_stand_in as stand_in
from torch import Tensor
from transformer_engine_runs import install_stand_in

_EIGHT_BITS = torch.float8_e4m3fn


def install_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in be imported, with layers that allocate as Transformer Engine's do."""
    install_stand_in(monkeypatch)
    monkeypatch.setattr(stand_in, "_cast", lambda weight: _both_layouts(weight, stand_in.STATE.recipe, is_weight=True))
    monkeypatch.setattr(stand_in, "_LinearFn", _LinearFn)
    monkeypatch.setattr(stand_in, "_GroupedLinearFn", _GroupedLinearFn)
    monkeypatch.setattr(stand_in, "_normalize", lambda x, weight, bias, offset, eps: _NormFn.apply(x, weight, bias))


def _both_layouts(x: Tensor, recipe: Any, *, is_weight: bool = False) -> tuple[Tensor, Tensor]:
    """Return rows and columns in 8 bits, both in the shape of x, which is as large; scales lengthen the last dim."""
    *rows, width = x.shape
    scales = {"mxfp8": width // 32, "blockwise": 0 if is_weight else 4 * (width // 128)}.get(recipe.name, 0)
    shape = *rows, width + scales
    return x.detach().new_empty(shape, dtype=_EIGHT_BITS), x.detach().new_empty(shape, dtype=_EIGHT_BITS)


def _gathered(x: Tensor, layer: Any, mode: str) -> Tensor:
    """Return x with the whole sequence, if layers of this mode gather it."""
    if layer.mode != mode or not layer.sequence_parallel:
        return x
    return x.new_empty((x.shape[0] * layer.group.size(), *x.shape[1:]))


def _scattered(x: Tensor, layer: Any, mode: str) -> Tensor:
    """Return x with a rank's part of the sequence, if layers of this mode scatter it."""
    if layer.mode != mode or not layer.sequence_parallel:
        return x
    return x.new_empty((x.shape[0] // layer.group.size(), *x.shape[1:]))


class _LinearFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any, matmuls: Any) -> Tensor:
        recipe = stand_in.STATE.recipe
        rows, columns = _both_layouts(x, recipe)
        ctx.layer, ctx.shape, ctx.recipe = layer, weight.shape, recipe
        ctx.save_for_backward(columns)
        rows = _gathered(rows, layer, "column")
        return _scattered(x.new_empty((*rows.shape[:-1], weight.shape[0])), layer, "row")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _gathered(ctx.saved_tensors[0], ctx.layer, "column")
        rows, columns = (_gathered(cast, ctx.layer, "row") for cast in _both_layouts(dy, ctx.recipe))
        dx = _scattered(dy.new_empty((*rows.shape[:-1], ctx.shape[1])), ctx.layer, "column")
        dweight = dy.new_empty(ctx.shape)
        del inputs, columns  # alive until here
        return dx, dweight, None, None


class _GroupedLinearFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Any, cached: Any, matmuls: Any, *weights: Tensor) -> Tensor:
        ctx.recipe = stand_in.STATE.recipe
        _, columns = _both_layouts(x, ctx.recipe)
        ctx.shapes = [weight.shape for weight in weights]
        ctx.save_for_backward(columns)
        return x.new_empty((x.shape[0], weights[0].shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        casts = _both_layouts(dy, ctx.recipe)
        dx = dy.new_empty((dy.shape[0], ctx.shapes[0][1]))
        dweights = [dy.new_empty(shape) for shape in ctx.shapes]
        del casts  # alive until here
        return dx, None, None, None, *dweights


class _NormFn(torch.autograd.Function):
    """A fused norm: it saves its input, and statistics of each row in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight) if ctx.has_bias else None
