"""Rotary position embedding (Su et al., 2021), in the rotate-half form of Hugging Face checkpoints.

Its frequencies are scaled for sequences longer than the original training length: linear, llama3, yarn and longrope.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.config import RopeConfig
from megalaunch.engine.platform.host_copy import copy_to_device
from megalaunch.kernels.overridable import is_overridden, overridable, target_name
from megalaunch.kernels.rope import fuses_rope, rope_fused
from megalaunch.plan.attention_factor import attention_factor


class RopeCache(NamedTuple):
    """Cosines and sines of each position's angles, [S, R] or [B, 1, S, R], for the first R features of each head.

    For one new position per row in generation, `matrix` [1, R, R] or [B, R, R] is the rotation: one bmm rotates all
    heads. A token takes hundreds of small operators, and each that is saved counts.
    """

    cos: Tensor
    sin: Tensor
    matrix: Tensor | None = None


def rope_cos_sin(
    positions: Tensor, rope: RopeConfig, dtype: torch.dtype, last_positions: Tensor | None = None
) -> RopeCache:
    """Compute cosines and sines for integer position ids. Angles are always computed in fp32.

    They are computed in each forward pass and are no buffer: a buffer would be lost when a model that was built on the
    meta device is materialised by `to_empty`.

    Args:
        positions: Position ids, [S] for all samples or [B, S] for each.
        rope: The rotation's frequencies and scaling.
        dtype: The dtype of the result.
        last_positions: The last position of each sample [B, 1], or of each token's sample [B, S], on which LongRoPE
            depends; None: that among `positions`, which hold full samples.
    """
    last = positions.amax(dim=-1, keepdim=True) if last_positions is None else last_positions
    exponents = torch.arange(0, rope.rotary_dim, 2, device=positions.device, dtype=torch.float32) / rope.rotary_dim
    frequencies = scaled_inv_freq(1.0 / rope.theta**exponents, rope, last)
    angles = positions.to(torch.float32)[..., None] * frequencies
    both_halves = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        both_halves = both_halves.unsqueeze(1)  # broadcast over heads
    size = attention_factor(rope)
    cos, sin = (both_halves.cos() * size).to(dtype), (both_halves.sin() * size).to(dtype)
    one_token = torch.is_inference_mode_enabled() and positions.shape[-1] == 1
    return RopeCache(cos, sin, _rotation_matrix(cos, sin) if one_token else None)


@overridable
def apply_rope(x_BNSD: Tensor, rotation: RopeCache) -> Tensor:
    """Rotate the pairs (i, i + R/2) of each head's first R features by their position's angle."""
    cos, sin, matrix = rotation
    if matrix is None and fuses_rope(x_BNSD):
        return rope_fused((x_BNSD,), cos, sin)[0]
    width = cos.shape[-1]
    if width < x_BNSD.shape[-1]:
        return torch.cat((apply_rope(x_BNSD[..., :width], rotation), x_BNSD[..., width:]), dim=-1)
    if matrix is not None:
        return torch.bmm(x_BNSD[:, :, 0], matrix.expand(x_BNSD.shape[0], -1, -1)).unsqueeze(2)
    return apply_function(_ApplyRope, x_BNSD, cos, sin)


_APPLY_ROPE = target_name(apply_rope)


def apply_rope_to_both(q_BNSD: Tensor, k_BGSD: Tensor, rotation: RopeCache) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as `apply_rope` does; in one launch where that has a kernel, and is not replaced."""
    if rotation.matrix is None and fuses_rope(q_BNSD) and not is_overridden(_APPLY_ROPE, q_BNSD):
        q_BNSD, k_BGSD = rope_fused((q_BNSD, k_BGSD), rotation.cos, rotation.sin)
        return q_BNSD, k_BGSD
    return apply_rope(q_BNSD, rotation), apply_rope(k_BGSD, rotation)


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


def _rotation_matrix(cos: Tensor, sin: Tensor) -> Tensor:
    """Return the matrix that rotates a head's features at one position, [R, R] or [B, R, R] with a leading 1."""
    unit = torch.eye(cos.shape[-1], dtype=cos.dtype, device=cos.device)
    return _rotate_half(unit, cos, sin, 1).view(-1, *unit.shape)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-way)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=way)
    return out


def scaled_inv_freq(frequencies: Tensor, rope: RopeConfig, last: Tensor) -> Tensor:
    """Return the scaled inverse frequencies in radians per position, fp32: [R / 2], for longrope [*last.shape, R / 2].

    Args:
        frequencies: The unscaled inverse frequencies, [R / 2].
        rope: The scaling and its parameters.
        last: The last position of the sequence, [1], [B, 1] or [B, S]; only longrope depends on it.
    """
    if rope.scaling == "longrope":
        return _longrope(rope, last)
    if rope.scaling == "linear":  # Chen et al. 2023
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(frequencies, rope)
    if rope.scaling == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones unchanged, those in between interpolated."""
    turns = rope.original_positions * frequencies / (2 * math.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / rope.factor)


def _longrope(rope: RopeConfig, last: Tensor) -> Tensor:
    """LongRoPE (Ding et al. 2024): a divisor for each pair, by whether the sequence exceeds the original context.

    Periods are multiplied by the divisors and then inverted: another order rounds differently, which shows at large
    positions.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, device=last.device, dtype=torch.float32) / rope.rotary_dim
    divisors = copy_to_device(torch.tensor((rope.short_factors, rope.long_factors)), last.device)
    short, long = (1.0 / (divisors * rope.theta**exponents)).unbind()
    return torch.where((last >= rope.original_positions)[..., None], long, short)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): a ramp from unscaled high frequencies to fully scaled low ones.

    Periods are multiplied and then inverted, as in `_longrope`.
    """
    pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        return pairs * math.log(rope.original_positions / (turns * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    index = torch.arange(pairs, device=frequencies.device, dtype=torch.float32)
    stretch = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    exponents = torch.arange(0, rope.rotary_dim, 2, device=frequencies.device, dtype=torch.float32) / rope.rotary_dim
    kept = 1 - stretch
    return 1.0 / (rope.factor * rope.theta**exponents) * (1 - kept) + frequencies * kept
