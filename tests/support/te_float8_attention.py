"""Causal attention in fp8 as Transformer Engine's `FusedAttention` casts it by delayed scales, emulated on CPUs.

Queries, keys and values have one scale, weights one, outputs one, and so have their gradients. Their places are those
of `META_QKV`, `META_S`, `META_O`, `META_DQKV`, `META_DP` and `META_DO`. Outputs and gradients are returned in the dtype
of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from te_delayed_scaling import BACKWARD, FORWARD, Tensors
from torch import Tensor

QKV, OUTPUT, WEIGHTS = 2, 3, 8
GRAD_QKV, GRAD_OUTPUT, GRAD_WEIGHTS = 0, 3, 5


class Casts:
    """Casts by the scales that a layer had at its forward pass, and notes amaxes."""

    def __init__(self, meta: dict[str, Tensors], gradients: torch.dtype) -> None:
        self._meta, self._scales = meta, {FORWARD: meta[FORWARD].scale.clone()}
        self._formats = {FORWARD: torch.float8_e4m3fn, BACKWARD: gradients}

    def __call__(self, direction: str, place: int, *values: Tensor) -> list[Tensor]:
        scale = self._scales.get(direction, self._meta[direction].scale)[place].clone()
        history, number_format = self._meta[direction].amax_history, self._formats[direction]
        largest = torch.finfo(number_format).max
        for value in values:
            history[0, place] = torch.maximum(history[0, place], value.abs().max())
        return [(value.float() * scale).clamp(-largest, largest).to(number_format).float() / scale for value in values]


class Float8AttentionFn(torch.autograd.Function):
    """[B, s, N, D], [B, T, N, D], [B, T, N, F] -> [B, s, N, F]; `mask`: [s, T]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, casts: Casts) -> Tensor:
        q8, k8, v8 = casts(FORWARD, QKV, q, k, v)
        scores = torch.einsum("bsnd,btnd->bnst", q8, k8) * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        (weights8,) = casts(FORWARD, WEIGHTS, weights)
        (out,) = casts(FORWARD, OUTPUT, torch.einsum("bnst,btnf->bsnf", weights8, v8))
        ctx.save_for_backward(q8, k8, v8, weights, out)
        ctx.scale, ctx.casts, ctx.dtype = scale, casts, q.dtype
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q8, k8, v8, weights, out = ctx.saved_tensors
        (grad8,) = ctx.casts(BACKWARD, GRAD_OUTPUT, grad)
        of_weights = torch.einsum("bsnf,btnf->bnst", grad8, v8)
        means = torch.einsum("bsnf,bsnf->bns", grad8, out)
        (scores8,) = ctx.casts(BACKWARD, GRAD_WEIGHTS, weights * (of_weights - means.unsqueeze(-1)))
        parts = (
            torch.einsum("bnst,btnd->bsnd", scores8, k8) * ctx.scale,
            torch.einsum("bnst,bsnd->btnd", scores8, q8) * ctx.scale,
            torch.einsum("bnst,bsnf->btnf", weights, grad8),
        )
        grads = ctx.casts(BACKWARD, GRAD_QKV, *parts)
        return *(each.to(ctx.dtype) for each in grads), None, None, None
