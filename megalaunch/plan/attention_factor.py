"""The attention factor of a scaled rotary embedding (RoPE), as in transformers."""

from __future__ import annotations

import math
from typing import Protocol


class ScaledRope(Protocol):
    """The fields on which the attention factor depends: of a RopeConfig, or of the schema's section."""

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
    """Return the factor on rotated queries and keys that keeps the softmax equally sharp; 1 without scaling.

    For yarn (YaRN paper, section 3.4) and longrope, unless `attention_factor` is given.
    """
    if rope.scaling not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling == "longrope":
        grown = math.log(rope.factor) / math.log(rope.original_positions or 1) if rope.factor > 1 else 0.0
        return math.sqrt(1 + grown)
    return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)


def latent_softmax_factor(rope: ScaledRope) -> float:
    """Return the factor on the softmax scale of latent attention under yarn (DeepSeek-V2): the square of its mscale.

    It scales the scores of whole heads, of which only a part is rotated; `attention_factor` then leaves that part as it
    is, if mscale equals mscale_all_dim.
    """
    return _yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2 if rope.scaling == "yarn" else 1.0


def _yarn_mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
