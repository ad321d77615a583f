"""The attention factor of a stretched rotary embedding, as transformers has it: how much queries and keys grow."""

from __future__ import annotations

import math
from typing import Protocol


class ScaledRope(Protocol):
    """What the growth of rotated queries and keys depends on: of a RopeConfig, or of the schema's section."""

    @property
    def scaling(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def original_positions(self) -> int | None: ...
    @property
    def attention_factor(self) -> float | None: ...
    @property
    def mscale(self) -> float: ...
    @property
    def mscale_all_dim(self) -> float: ...


def attention_factor(rope: ScaledRope) -> float:
    """What rotated queries and keys are multiplied with, so that the softmax stays as sharp.

    Of yarn (its section 3.4) and longrope, where no attention_factor says it.
    """
    if rope.scaling not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling == "longrope":
        grown = math.log(rope.factor) / math.log(rope.original_positions or 1) if rope.factor > 1 else 0.0
        return math.sqrt(1 + grown)
    return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)


def _yarn_mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
