"""Rotary position embedding (Su et al., 2021), in the rotate-half form of Hugging Face checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.config import RopeConfig
from megalaunch.engine.model.rope_scaling import scaled_inv_freq
from megalaunch.plan.attention_factor import attention_factor


class RopeCache(NamedTuple):
    """Cosines and sines of each position's angles, [S, R] or [B, 1, S, R], for the first R features of each head."""

    cos: Tensor
    sin: Tensor


def rope_cos_sin(positions: Tensor, rope: RopeConfig, dtype: torch.dtype, last: Tensor | None = None) -> RopeCache:
    """Compute cosines and sines for integer position ids. Angles are always computed in fp32.

    They are computed in each forward pass and are no buffer: a buffer would be lost when a model that was built on the
    meta device is materialised by `to_empty`.

    Args:
        positions: Position ids, [S] for all samples or [B, S] for each.
        rope: The rotation's frequencies and scaling.
        dtype: The dtype of the result.
        last: The last position of the full sequence, [] or [B], where `positions` are only a part of it; None: their
            maximum. LongRoPE depends on it.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, device=positions.device, dtype=torch.float32) / rope.rotary_dim
    last = positions.amax(dim=-1) if last is None else last
    frequencies = scaled_inv_freq(1.0 / rope.theta**exponents, rope, last)
    angles = positions.to(torch.float32)[..., None] * frequencies
    both_halves = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        both_halves = both_halves.unsqueeze(1)  # broadcast over heads
    size = attention_factor(rope)
    return RopeCache((both_halves.cos() * size).to(dtype), (both_halves.sin() * size).to(dtype))


def apply_rope(x_BNSD: Tensor, rotation: RopeCache) -> Tensor:
    """Rotate the pairs (i, i + R/2) of each head's first R features by their position's angle."""
    width = rotation.cos.shape[-1]
    turned = apply_function(_ApplyRope, x_BNSD[..., :width], *rotation)
    rest = x_BNSD[..., width:]
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class _ApplyRope(torch.autograd.Function):
    """Rotation by the angles; backward rotates by the negative angles. Three passes over memory each."""

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
