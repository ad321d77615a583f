"""How scores become weights: their scale, a soft cap on their size, a sink that takes a part of the softmax, dropout.

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalaunch.engine.model.dropout import combined, hashed, kept
from megalaunch.engine.model.sight import Sight


@dataclass(frozen=True)
class Scoring:
    """`scale` None: 1 / sqrt(D); `soft_cap`: cap * tanh(score / cap) (Gemma 2); `sinks` [N]: one logit a head
    that joins its softmax and is dropped (gpt-oss); `words` [B, N]: by which weights are dropped at `dropout`."""

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    words: Tensor | None = None
    dropout: float = 0.0

    @property
    def plain(self) -> bool:
        """True when torch's own attention computes it."""
        return self.soft_cap is None and self.sinks is None and self.words is None

    def scaling(self, q_BNSD: Tensor) -> float:
        """The scale, or what stands for it."""
        return float(q_BNSD.shape[-1] ** -0.5) if self.scale is None else self.scale

    def scores(self, q_BNSD: Tensor, k_BNTD: Tensor) -> Tensor:
        """[B, N, S, T] in fp32, capped, before any mask."""
        raw = (q_BNSD.float() @ k_BNTD.float().mT).mul_(self.scaling(q_BNSD))
        return raw if self.soft_cap is None else capped(raw, self.soft_cap)

    def kept(self, sight: Sight) -> Tensor | None:
        """Which weights dropout leaves, bool [B, N, S, T]; None: all."""
        if self.words is None:
            return None
        return kept(combined(self.words[..., None], sight.places_q), hashed(sight.places_k), self.dropout)

    def of_heads(self, rank: int, ranks: int) -> Scoring:
        """That of one of `ranks` equal parts of the heads."""
        sinks = None if self.sinks is None else self.sinks.chunk(ranks)[rank]
        words = None if self.words is None else self.words.chunk(ranks, dim=1)[rank]
        return replace(self, sinks=sinks, words=words)


PLAIN = Scoring()


def capped(x: Tensor, cap: float) -> Tensor:
    """Kept below `cap` in size, and hardly changed where it is small."""
    return cap * torch.tanh(x / cap)
