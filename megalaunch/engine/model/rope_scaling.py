"""RoPE scaling for sequences longer than the original training length: linear, llama3, yarn and longrope."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalaunch.engine.model.config import RopeConfig


def scaled_inv_freq(frequencies: Tensor, rope: RopeConfig, last: Tensor) -> Tensor:
    """Return the scaled inverse frequencies in radians per position, [R / 2] fp32; [B, 1, R / 2] where `last` is [B].

    Args:
        frequencies: The unscaled inverse frequencies, [R / 2].
        rope: The scaling and its parameters.
        last: The last position of the sequence, [] or [B]; only longrope depends on it.
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
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _longrope(rope: RopeConfig, last: Tensor) -> Tensor:
    """LongRoPE (Ding et al. 2024): a divisor for each pair, by whether the sequence exceeds the original context.

    Periods are multiplied by the divisors and then inverted: another order rounds differently, which shows at large
    positions.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, device=last.device, dtype=torch.float32) / rope.rotary_dim
    short, long = (
        1.0 / (torch.tensor(factors, device=last.device) * rope.theta**exponents)
        for factors in (rope.short_factors, rope.long_factors)
    )
    beyond = last >= rope.original_positions
    return torch.where(beyond if last.dim() == 0 else beyond.view(-1, 1, 1), long, short)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): a ramp from unscaled high frequencies to fully scaled low ones."""
    pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        return pairs * math.log(rope.original_positions / (turns * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    index = torch.arange(pairs, device=frequencies.device, dtype=torch.float32)
    stretch = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - stretch) + frequencies / rope.factor * stretch
