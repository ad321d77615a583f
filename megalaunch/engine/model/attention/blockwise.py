"""Attention by blocks, each merged by its log-sum-exp; scores are made again in the backward pass, and never kept.

Liu et al. 2023; Dao 2023 for the backward pass. Scores are fp32; what is as large as they are is changed in place.
Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.attention.mask import AttentionMask
from megalaunch.engine.model.attention.score_mod import ScoreMod

_QUERIES = 512  # of a block on one device


@dataclass
class OnlineSoftmax:
    """The output [B, N, S, D] of the blocks of keys so far, and the log-sum of their scores [B, N, S, 1], in fp32."""

    output: Tensor
    log_sum: Tensor

    @classmethod
    def empty(cls, q: Tensor, sinks: Tensor | None) -> OnlineSoftmax:
        """Before the first block."""
        log_sum = torch.full((*q.shape[:-1], 1), -torch.inf, device=q.device)
        if sinks is not None:
            log_sum = log_sum.maximum(sinks.float()[:, None, None])
        return cls(torch.zeros_like(q, dtype=torch.float32), log_sum)

    def add(self, q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scoring: ScoreMod) -> None:
        """One more block of keys [B, N, T, D]."""
        kept = scoring.dropout_mask(mask)
        scores = scoring.scores(q, keys).masked_fill_(~mask.allowed, -torch.inf)
        merged = torch.logaddexp(self.log_sum, scores.logsumexp(dim=-1, keepdim=True))
        weights = scores.sub_(merged.clamp(min=torch.finfo(torch.float32).min)).exp_()
        weights = apply_dropout(weights, kept, scoring)
        self.output = self.output * (self.log_sum - merged).exp().nan_to_num() + weights @ values.float()
        self.log_sum = merged


@dataclass(frozen=True)
class BlockwiseBackward:
    """What the gradients of every block need: of the whole output, its gradient in fp32, and the log-sum."""

    dout: Tensor
    share: Tensor
    log_sum: Tensor

    @classmethod
    def start(cls, out: Tensor, dout: Tensor, log_sum: Tensor) -> BlockwiseBackward:
        """`share` is how much of each softmax's gradient its normalisation takes away."""
        dout = dout.float()
        return cls(dout, (dout * out.float()).sum(dim=-1, keepdim=True), log_sum)

    def block(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scoring: ScoreMod
    ) -> tuple[Tensor, ...]:
        """What a block adds to the gradients of queries, keys and values, [B, N, ...] in fp32 each."""
        kept = scoring.dropout_mask(mask)  # before there are scores: its words are as large
        keys, values = keys.float(), values.float()
        scores = scoring.scores(q, keys)
        capping = None if scoring.soft_cap is None else 1 - (scores / scoring.soft_cap).square()
        weights = scores.masked_fill_(~mask.allowed, -torch.inf).sub_(self.log_sum).exp_()
        dweights = apply_dropout(self.dout @ values.mT, kept, scoring)
        dscores = dweights.sub_(self.share).mul_(weights).mul_(scoring.softmax_scale(q))
        if capping is not None:
            dscores.mul_(capping)
        return dscores @ keys, dscores.mT @ q.float(), apply_dropout(weights, kept, scoring).mT @ self.dout

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        """The gradient of the sinks: their value is 0, so that only their share of the sum is left."""
        if sinks is None:
            return None
        weights = (sinks.float()[:, None, None] - self.log_sum).exp()
        return -(weights * self.share).sum(dim=(0, 2, 3)).to(sinks.dtype)


def apply_dropout(weights: Tensor, kept: Tensor | None, scoring: ScoreMod) -> Tensor:
    """In place: zeros where not kept, and the rest divided by what is kept of all."""
    return weights if kept is None else weights.mul_(kept).mul_(1 / (1 - scoring.dropout))


def attention(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: AttentionMask, scoring: ScoreMod) -> Tensor:
    """Attention over the keys that a sight shows: [B, N, S, D]."""
    if scoring.is_default:
        grouped = q_BNSD.shape[1] != k_BGTD.shape[1]
        return F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, attn_mask=mask.allowed, scale=scoring.scale, enable_gqa=grouped
        )
    out: Tensor = _BlockwiseAttention.apply(q_BNSD, k_BGTD, v_BGTD, mask, scoring, scoring.sinks)  # type: ignore[no-untyped-call]
    return out


class _BlockwiseAttention(torch.autograd.Function):
    """Attention on one device, a block of queries at a time; `sinks` are the scoring's, as what gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: ScoreMod, sinks: Tensor | None
    ) -> Tensor:
        keys, values = repeat_kv(k, q), repeat_kv(v, q)
        outputs, log_sums = [], []
        for first in range(0, q.shape[2], _QUERIES):
            part = slice(first, first + _QUERIES)
            merged = OnlineSoftmax.empty(q[:, :, part], sinks)
            merged.add(q[:, :, part], keys, values, mask.slice_queries(part.start, part.stop), scoring)
            outputs.append(merged.output.to(q.dtype).transpose(1, 2))
            log_sums.append(merged.log_sum)
        # Token by token in memory, so that the projection behind reads it as it is.
        out, log_sum = torch.cat(outputs, dim=1).transpose(1, 2), torch.cat(log_sums, dim=2)
        ctx.mask, ctx.scoring = mask, scoring
        ctx.save_for_backward(q, k, v, out, log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks = ctx.saved_tensors
        keys, values = repeat_kv(k, q), repeat_kv(v, q)
        whole = BlockwiseBackward.start(out, gradients[0], log_sum)
        dq = []
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
        for first in range(0, q.shape[2], _QUERIES):
            part = slice(first, first + _QUERIES)
            backward = BlockwiseBackward(*(x[:, :, part] for x in (whole.dout, whole.share, log_sum)))
            seen = ctx.mask.slice_queries(part.start, part.stop)
            more_dq, more_dk, more_dv = backward.block(q[:, :, part], keys, values, seen, ctx.scoring)
            dq.append(more_dq.to(q.dtype))
            dk += more_dk
            dv += more_dv
            del more_dq, more_dk, more_dv
        return (
            torch.cat(dq, dim=2),
            sum_over_kv_group(dk, k.shape[1]).to(k.dtype),
            sum_over_kv_group(dv, v.shape[1]).to(v.dtype),
            None,
            None,
            whole.sinks(sinks),
        )


def repeat_kv(x_BGTD: Tensor, q_BNSD: Tensor) -> Tensor:
    """Keys or values for each query head, [B, N, T, D]."""
    return x_BGTD.repeat_interleave(q_BNSD.shape[1] // x_BGTD.shape[1], dim=1)


def sum_over_kv_group(gradient_BNTD: Tensor, groups: int) -> Tensor:
    """The gradient of a group: the sum over the heads it serves."""
    return gradient_BNTD.view(gradient_BNTD.shape[0], groups, -1, *gradient_BNTD.shape[2:]).sum(dim=2)
