"""Score modification: how attention scores become weights, by scale, soft cap, sinks and dropout.

Shapes: B batch, N query heads, S queries, T keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.engine.model.attention.mask import AttentionMask
from megalaunch.engine.model.dropout import hash_ids, keep_mask, mix_seed
from megalaunch.engine.precision.transformer_engine_attention import Float8Attention


@dataclass(frozen=True)
class ScoreMod:
    """How attention scores become weights.

    Args:
        scale: The factor of q k; None: 1 / sqrt(D).
        soft_cap: The cap of cap * tanh(score / cap) (Gemma 2); None: no cap.
        sinks: One logit per head, [N], that joins the softmax and has no value vector (gpt-oss).
        dropout_seeds: Seeds of the dropout masks, [B, N]; None: no dropout.
        dropout: The probability with which a weight is dropped.
        float8: The layer of Transformer Engine that casts to fp8; None: attention computes in the dtype of its inputs.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    dropout_seeds: Tensor | None = None
    dropout: float = 0.0
    float8: Float8Attention | None = None

    @property
    def is_default(self) -> bool:
        """True if torch's own attention supports it: there is no soft cap, sink or dropout."""
        return self.soft_cap is None and self.sinks is None and self.dropout_seeds is None

    @property
    def modifies_scores(self) -> bool:
        """True if scores are capped or dropped, which fused kernels do not; a sink only joins their log-sum-exp."""
        return self.soft_cap is not None or self.dropout_seeds is not None

    def softmax_scale(self, q_BNSD: Tensor) -> float:
        """Return the scale, by default 1 / sqrt(D)."""
        return float(q_BNSD.shape[-1] ** -0.5) if self.scale is None else self.scale

    def scores(self, q_BNSD: Tensor, k_BNTD: Tensor) -> Tensor:
        """Return the scaled and capped scores before masking, fp32 [B, N, S, T]."""
        raw = (q_BNSD.float() @ k_BNTD.float().mT).mul_(self.softmax_scale(q_BNSD))
        return raw if self.soft_cap is None else softcap(raw, self.soft_cap)

    def dropout_mask(self, mask: AttentionMask) -> Tensor | None:
        """Return which weights dropout keeps, bool [B, N, S, T]; None: all."""
        if self.dropout_seeds is None:
            return None
        return keep_mask(
            mix_seed(self.dropout_seeds[..., None], mask.q_positions), hash_ids(mask.k_positions), self.dropout
        )

    def of_row(self, row: int | None) -> ScoreMod:
        """Return the score modification of one row of the batch; None: of all rows."""
        if row is None or self.dropout_seeds is None:
            return self
        return replace(self, dropout_seeds=self.dropout_seeds[row : row + 1])

    def shard_heads(self, rank: int, ranks: int) -> ScoreMod:
        """Return the score modification of rank `rank`'s shard of the heads."""
        sinks = None if self.sinks is None else self.sinks.chunk(ranks)[rank]
        seeds = None if self.dropout_seeds is None else self.dropout_seeds.chunk(ranks, dim=1)[rank]
        return replace(self, sinks=sinks, dropout_seeds=seeds)


DEFAULT_SCORE_MOD = ScoreMod()


class AttentionFn(Protocol):
    """Core attention, between the projections: softmax(q k^T) v under a causal mask."""

    def __call__(
        self, q_BNsD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /
    ) -> Tensor:
        """Attend with queries [B, N, s, D] to keys and values [B, G, T, D] -> [B, N, s, D]."""


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap): bounded by `cap`, and nearly x for small x."""
    return cap * torch.tanh(x / cap)


def apply_dropout(weights: Tensor, dropout_mask: Tensor | None, scoring: ScoreMod) -> Tensor:
    """Apply dropout in place: zero the weights that are not kept, and divide the others by 1 - dropout."""
    return weights if dropout_mask is None else weights.mul_(dropout_mask).mul_(1 / (1 - scoring.dropout))
