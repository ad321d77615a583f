"""How scores become weights: their scale, a soft cap on their size, a sink that takes a part of the softmax.

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """`scale` None: 1 / sqrt(D); `soft_cap`: cap * tanh(score / cap) (Gemma 2); `sinks` [N]: one logit a head
    that joins its softmax and is dropped (gpt-oss)."""

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True when torch's own attention computes it."""
        return self.soft_cap is None and self.sinks is None

    def scores(self, q_BNSD: Tensor, k_BNTD: Tensor) -> Tensor:
        """[B, N, S, T] in fp32, capped, before any mask."""
        scale = q_BNSD.shape[-1] ** -0.5 if self.scale is None else self.scale
        raw = (q_BNSD.float() @ k_BNTD.float().mT).mul_(scale)
        return raw if self.soft_cap is None else capped(raw, self.soft_cap)

    def of_heads(self, rank: int, ranks: int) -> Scoring:
        """That of one of `ranks` equal parts of the heads."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.chunk(ranks)[rank])


PLAIN = Scoring()


def capped(x: Tensor, cap: float) -> Tensor:
    """Kept below `cap` in size, and hardly changed where it is small."""
    return cap * torch.tanh(x / cap)


def weigh(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Attention over the keys that `mask` (bool, [..., S, T]) shows: [B, N, S, D]."""
    grouped = q_BNSD.shape[1] != k_BGTD.shape[1]
    if scoring.plain:
        return F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, attn_mask=mask, scale=scoring.scale, enable_gqa=grouped
        )
    share = q_BNSD.shape[1] // k_BGTD.shape[1]
    k_BNTD, v_BNTD = (x.repeat_interleave(share, dim=1) for x in (k_BGTD, v_BGTD))
    scores = scoring.scores(q_BNSD, k_BNTD).masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        sink = scoring.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ v_BNTD.float()).to(q_BNSD.dtype)
