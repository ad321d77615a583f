"""Rotary position embedding (Su et al., 2021), in the rotate-half form of Hugging Face checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of every position's angles, [S, D] or [B, 1, S, D], ready to multiply heads with."""

    cos: Tensor
    sin: Tensor


def rotation_of(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation at integer `positions`, [S] for all samples or [B, S] for each.

    Angles are computed in fp32, never in a half format.

    It is a function and no buffer: a buffer is lost when a model made on the meta device is given memory.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32)[..., None] * (1.0 / theta**exponents)
    both_halves = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        both_halves = both_halves.unsqueeze(1)  # alike for all heads
    return Rotation(both_halves.cos().to(dtype), both_halves.sin().to(dtype))


def rotate(x_BNSD: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each head's pairs (i, i + D/2) by their position's angle."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * rotation.cos + torch.cat((-second, first), dim=-1) * rotation.sin
