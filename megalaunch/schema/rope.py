"""The `model.rope` section: rotary position embedding and its context extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (RoPE) and its context extension.

    RoPE: Su et al. 2021. Scalings: Chen et al. 2023 (linear), Llama 3.1 (llama3), Peng et al. 2023 (yarn), Ding et al.
    2024 (longrope).
    """

    theta: float = setting(10000.0, "Base of the rotary frequencies (rope_theta).", minimum=1)
    window_theta: float | None = setting(
        None,
        "Base in layers with a sliding window, which then use no scaling; null: the same as other layers.",
        minimum=1,
    )
    fraction: float = setting(1.0, "Fraction of each head's dimensions that are rotated.", minimum=0, maximum=1)
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = setting(
        "none", "Scaling of the frequencies for a longer context."
    )
    factor: float = setting(1.0, "Extended context length / original context length.", minimum=1)
    original_positions: int | None = setting(
        None, "Original context length (llama3, yarn, longrope).", "tokens", minimum=1
    )
    low_frequency_factor: float = setting(
        1.0, "Wavelengths above original_positions / this are scaled by the full factor (llama3).", minimum=0
    )
    high_frequency_factor: float = setting(
        4.0, "Wavelengths below original_positions / this are not scaled (llama3).", minimum=0
    )
    beta_fast: float = setting(
        32.0, "Rotations within the original context above which a frequency is not scaled (yarn).", minimum=0
    )
    beta_slow: float = setting(1.0, "Rotations below which a frequency is scaled by the full factor (yarn).", minimum=0)
    truncate: bool = setting(
        True, "Round the ends of the ramp between beta_fast and beta_slow to integer dimensions (yarn)."
    )
    short_factors: tuple[float, ...] = setting(
        (), "Divisor of each frequency in sequences within the original context (longrope).", minimum=0
    )
    long_factors: tuple[float, ...] = setting(
        (), "Divisor of each frequency in longer sequences (longrope).", minimum=0
    )
    attention_factor: float | None = setting(
        None,
        "Factor applied to rotated queries and keys (yarn, longrope); null: derived from rope.factor.",
        minimum=0,
    )
    mscale: float = setting(1.0, "Growth of the attention factor with the log of rope.factor (yarn).", minimum=0)
    mscale_all_dim: float = setting(
        0.0, "Growth of the softmax scale of latent attention with the log of rope.factor (yarn).", minimum=0
    )
