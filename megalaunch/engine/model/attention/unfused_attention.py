"""Attention of short samples operator by operator: every score is held, and its softmax weight is saved for backward.

As Megatron's unfused attention: products in the dtype of queries, softmax in fp32.
Shapes: B batch, N query heads, G key/value groups, R = N / G, S queries, T keys, D head dim, F width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.engine.model.attention.mask import AttentionMask
from megalaunch.engine.model.attention.score_mod import ScoreMod, softcap


def unfused_attention(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTF: Tensor, mask: Tensor, scoring: ScoreMod) -> Tensor:
    """Return attention over the keys that the mask, bool [..., S, T], allows: [B, N, S, F]."""
    batch, heads, queries, _ = q_BNSD.shape
    groups, keys = k_BGTD.shape[1:3]
    # The heads of a group are rows of one product, so that keys and values are not repeated.
    scores = (q_BNSD * scoring.softmax_scale(q_BNSD)).reshape(batch, groups, -1, q_BNSD.shape[-1]) @ k_BGTD.mT
    scores = scores.view(batch, heads, queries, keys)
    if scoring.soft_cap is not None:
        scores = softcap(scores, scoring.soft_cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        column = scoring.sinks.to(scores.dtype)[:, None, None].expand(batch, heads, queries, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BNSD.dtype)
    if scoring.sinks is not None:
        weights = weights[..., :-1]
    kept = _dropout_mask(q_BNSD, keys, scoring)
    if kept is not None:
        weights = weights * kept / (1 - scoring.dropout)
    return (weights.reshape(batch, groups, -1, keys) @ v_BGTF).view(batch, heads, queries, -1)


def _dropout_mask(q_BNSD: Tensor, keys: int, scoring: ScoreMod) -> Tensor | None:
    """Return the same dropout mask as other backends, by position ids, bool [B, N, S, T]."""
    positions = torch.arange(keys, device=q_BNSD.device)
    return scoring.dropout_mask(AttentionMask(positions[: q_BNSD.shape[2]], positions))
