"""Rotary position embedding (Su et al., 2021), in the rotate-half form of Hugging Face checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalaunch.engine.model.config import RopeConfig
from megalaunch.engine.model.rope_scaling import scaled_inv_freq
from megalaunch.plan.attention_factor import attention_factor


class RopeCache(NamedTuple):
    """Cosines and sines of every position's angles, [S, R] or [B, 1, S, R], for the first R numbers of each head."""

    cos: Tensor
    sin: Tensor


def rope_cos_sin(positions: Tensor, rope: RopeConfig, dtype: torch.dtype, last: Tensor | None = None) -> RopeCache:
    """The rotation at integer `positions`, [S] for all samples or [B, S] for each.

    `last` [] or [B] is the last position of the whole text, of which these may be a part; None: it is among them.
    Angles are computed in fp32, never in a half format.

    It is a function and no buffer: a buffer is lost when a model made on the meta device is given memory.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, device=positions.device, dtype=torch.float32) / rope.rotary_dim
    last = positions.amax(dim=-1) if last is None else last
    frequencies = scaled_inv_freq(1.0 / rope.theta**exponents, rope, last)
    angles = positions.to(torch.float32)[..., None] * frequencies
    both_halves = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        both_halves = both_halves.unsqueeze(1)  # alike for all heads
    size = attention_factor(rope)
    return RopeCache((both_halves.cos() * size).to(dtype), (both_halves.sin() * size).to(dtype))


def apply_rope(x_BNSD: Tensor, rotation: RopeCache) -> Tensor:
    """Rotate the pairs (i, i + R/2) of each head's first R numbers by their position's angle."""
    width = rotation.cos.shape[-1]
    turned: Tensor = _ApplyRope.apply(x_BNSD[..., :width], *rotation)  # type: ignore[no-untyped-call]
    rest = x_BNSD[..., width:]
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class _ApplyRope(torch.autograd.Function):
    """By the angles, and in the backward pass back by them: in three passes over the numbers each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_half(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_half(gradients[0], cos, sin, -1), None, None


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-way)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=way)
    return out
