"""How scores become weights: their scale, a soft cap on their size, a sink that takes a part of the softmax, dropout.

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalaunch.engine.model.attention.mask import AttentionMask
from megalaunch.engine.model.dropout import hash_ids, keep_mask, mix_seed


@dataclass(frozen=True)
class ScoreMod:
    """`scale` None: 1 / sqrt(D); `soft_cap`: cap * tanh(score / cap) (Gemma 2); `sinks` [N]: one logit a head
    that joins its softmax and is dropped (gpt-oss); `words` [B, N]: by which weights are dropped at `dropout`."""

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    dropout_seeds: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_default(self) -> bool:
        """True when torch's own attention computes it."""
        return self.soft_cap is None and self.sinks is None and self.dropout_seeds is None

    def softmax_scale(self, q_BNSD: Tensor) -> float:
        """The scale, or what stands for it."""
        return float(q_BNSD.shape[-1] ** -0.5) if self.scale is None else self.scale

    def scores(self, q_BNSD: Tensor, k_BNTD: Tensor) -> Tensor:
        """[B, N, S, T] in fp32, capped, before any mask."""
        raw = (q_BNSD.float() @ k_BNTD.float().mT).mul_(self.softmax_scale(q_BNSD))
        return raw if self.soft_cap is None else softcap(raw, self.soft_cap)

    def dropout_mask(self, mask: AttentionMask) -> Tensor | None:
        """Which weights dropout leaves, bool [B, N, S, T]; None: all."""
        if self.dropout_seeds is None:
            return None
        return keep_mask(
            mix_seed(self.dropout_seeds[..., None], mask.q_positions), hash_ids(mask.k_positions), self.dropout
        )

    def shard_heads(self, rank: int, ranks: int) -> ScoreMod:
        """That of one of `ranks` equal parts of the heads."""
        sinks = None if self.sinks is None else self.sinks.chunk(ranks)[rank]
        seeds = None if self.dropout_seeds is None else self.dropout_seeds.chunk(ranks, dim=1)[rank]
        return replace(self, sinks=sinks, dropout_seeds=seeds)


PLAIN = ScoreMod()


def softcap(x: Tensor, cap: float) -> Tensor:
    """Kept below `cap` in size, and hardly changed where it is small."""
    return cap * torch.tanh(x / cap)
