"""The `model.rope` section: rotary positions and how they stretch beyond their training length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Su et al. 2021; scalings by Chen et al. 2023 (linear), Llama 3.1 (llama3), Peng et al. 2023 (yarn), Ding et al.
    2024 (longrope)."""

    theta: float = setting(10000.0, "Base of the rotary frequencies.", minimum=1)
    window_theta: float | None = setting(
        None, "Base in layers with a sliding window, which are then not stretched; null: as in all others.", minimum=1
    )
    fraction: float = setting(1.0, "Part of each head that is rotated.", minimum=0, maximum=1)
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = setting("none", "How frequencies are stretched.")
    factor: float = setting(1.0, "By how much the context is longer than the original.", minimum=1)
    original_positions: int | None = setting(
        None, "Context before the stretch (llama3, yarn, longrope).", "tokens", minimum=1
    )
    low_frequency_factor: float = setting(1.0, "Longest wave kept: original / this (llama3).", minimum=0)
    high_frequency_factor: float = setting(4.0, "Shortest wave stretched: original / this (llama3).", minimum=0)
    beta_fast: float = setting(32.0, "Turns within the original context above which nothing changes (yarn).", minimum=0)
    beta_slow: float = setting(1.0, "Turns below which all is stretched (yarn).", minimum=0)
    truncate: bool = setting(True, "The ends of the ramp between both are rounded to whole dimensions (yarn).")
    short_factors: tuple[float, ...] = setting(
        (), "What each pair's frequency is divided by in texts within the original context (longrope).", minimum=0
    )
    long_factors: tuple[float, ...] = setting((), "The same in longer texts (longrope).", minimum=0)
    attention_factor: float | None = setting(
        None,
        "What rotated queries and keys are multiplied with (yarn, longrope); null: as the factor has it.",
        minimum=0,
    )
    mscale: float = setting(1.0, "Growth of the attention scale with the factor (yarn).", minimum=0)
    mscale_all_dim: float = setting(0.0, "The same for the softmax scale of latent attention (yarn).", minimum=0)
