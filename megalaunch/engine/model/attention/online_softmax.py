"""Online softmax over blocks of keys, and attention of a block without a fused kernel.

Blocks of keys are merged by their log-sum-exp (Liu et al. 2023), and backward recomputes scores (Dao 2023), so that
none are saved. Scores are fp32, and tensors of their size are modified in place.

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim; that of values, and so of the output,
may differ from that of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.attention.block_mask import Block
from megalaunch.engine.model.attention.mask import AttentionMask
from megalaunch.engine.model.attention.score_mod import ScoreMod, apply_dropout
from megalaunch.kernels.causal_attention import masked_sdpa

QUERIES = 512  # per block without a fused kernel


@dataclass
class OnlineSoftmax:
    """Online softmax over key blocks: output [B, N, S, D] and log-sum-exp of scores [B, N, S, 1] so far, in fp32."""

    output: Tensor
    log_sum: Tensor

    @classmethod
    def empty(cls, q: Tensor, width: int, sinks: Tensor | None) -> OnlineSoftmax:
        """Return the state before the first block; the log-sum-exp starts at the sinks' logits. `width`: of values."""
        log_sum = torch.full((*q.shape[:-1], 1), -torch.inf, device=q.device)
        if sinks is not None:
            log_sum = log_sum.maximum(sinks.float()[:, None, None])
        batch, heads, queries, _ = q.shape
        # Token-major in memory, so that the output projection reads it without a copy.
        output = q.new_zeros(batch, queries, heads, width, dtype=torch.float32).transpose(1, 2)
        return cls(output, log_sum)

    def add(self, q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scoring: ScoreMod) -> None:
        """Merge a block of keys and values [B, N, T, D].

        With its masked scores s: L' = logaddexp(L, logsumexp(s)), out' = exp(L - L') out + exp(s - L') v.
        """
        dropout_mask = scoring.dropout_mask(mask)
        scores = scoring.scores(q, keys).masked_fill_(~mask.allowed, -torch.inf)
        merged = torch.logaddexp(self.log_sum, scores.logsumexp(dim=-1, keepdim=True))
        weights = scores.sub_(merged.clamp(min=torch.finfo(torch.float32).min)).exp_()
        weights = apply_dropout(weights, dropout_mask, scoring)
        self.output = self.output * (self.log_sum - merged).exp().nan_to_num() + weights @ values.float()
        self.log_sum = merged

    def merge(self, block: Block, out: Tensor, log_sum: Tensor) -> None:
        """Merge the output and log-sum-exp of a block, as `add` does. A query sees a key of it, or saw one before."""
        output, so_far = block.of_queries(self.output), block.of_queries(self.log_sum)
        merged = torch.logaddexp(so_far, log_sum)
        output.mul_((so_far - merged).exp_()).add_(out * (log_sum - merged).exp_())
        so_far.copy_(merged)


@dataclass(frozen=True)
class BlockwiseBackward:
    """What the gradients of all blocks share: the output, its gradient, and the log-sum-exp of all scores."""

    out: Tensor
    dout: Tensor
    log_sum: Tensor

    @cached_property
    def dout_fp32(self) -> Tensor:
        """The gradient of the output in fp32."""
        return self.dout.float()

    @cached_property
    def share(self) -> Tensor:
        """What the softmax's normalisation subtracts from its weights' gradients: rowsum(dout * out), [B, N, S, 1]."""
        return (self.dout.float() * self.out).sum(dim=-1, keepdim=True)  # keeps no fp32 tensor of all queries

    def of_block(self, block: Block) -> BlockwiseBackward:
        """Return those of the block's queries."""
        return BlockwiseBackward(*map(block.of_queries, (self.out, self.dout, self.log_sum)))

    def block(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scoring: ScoreMod
    ) -> tuple[Tensor, ...]:
        """Return a block's contributions to the gradients of queries, keys and values, [B, N, ...] in fp32.

        Without dropout: p = exp(s - L), ds = p (dout v^T - share) scale (1 - (s / cap)^2 if capped);
        dq = ds k, dk = ds^T q, dv = p^T dout.
        """
        dropout_mask = scoring.dropout_mask(mask)  # before the scores exist: its hashes are as large
        keys, values = keys.float(), values.float()
        scores = scoring.scores(q, keys)
        capping = None if scoring.soft_cap is None else 1 - (scores / scoring.soft_cap).square()
        weights = scores.masked_fill_(~mask.allowed, -torch.inf).sub_(self.log_sum).exp_()
        dweights = apply_dropout(self.dout_fp32 @ values.mT, dropout_mask, scoring)
        dscores = dweights.sub_(self.share).mul_(weights).mul_(scoring.softmax_scale(q))
        if capping is not None:
            dscores.mul_(capping)
        return dscores @ keys, dscores.mT @ q.float(), apply_dropout(weights, dropout_mask, scoring).mT @ self.dout_fp32

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Return the sinks' gradient, -sum(exp(sink - L) share): a sink adds to the sum and has no value vector."""
        if sinks is None:
            return None
        weights = (sinks.float()[:, None, None] - self.log_sum).exp()
        return -(weights * self.share).sum(dim=(0, 2, 3)).to(sinks.dtype)


def attention(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: AttentionMask, scoring: ScoreMod) -> Tensor:
    """Return attention over the keys that the mask allows, [B, N, S, D]: torch's own if it supports the scoring."""
    if scoring.is_default:
        return masked_sdpa(q_BNSD, k_BGTD, v_BGTD, mask.allowed, scoring.scale)
    return apply_function(_BlockwiseAttention, q_BNSD, k_BGTD, v_BGTD, mask, scoring, scoring.sinks)


class _BlockwiseAttention(torch.autograd.Function):
    """Attention on one device, one block of queries at a time.

    `sinks` are those of `scoring`: a tensor needs to be a direct input to get a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: ScoreMod, sinks: Tensor | None
    ) -> Tensor:
        keys, values = repeat_kv(k, q), repeat_kv(v, q)
        outputs, log_sums = [], []
        for first in range(0, q.shape[2], QUERIES):
            part = slice(first, first + QUERIES)
            merged = OnlineSoftmax.empty(q[:, :, part], v.shape[-1], sinks)
            merged.add(q[:, :, part], keys, values, mask.slice_queries(part.start, part.stop), scoring)
            outputs.append(merged.output.to(q.dtype).transpose(1, 2))
            log_sums.append(merged.log_sum)
        # Token-major in memory, so that the output projection reads it without a copy.
        out, log_sum = torch.cat(outputs, dim=1).transpose(1, 2), torch.cat(log_sums, dim=2)
        ctx.mask, ctx.scoring = mask, scoring
        ctx.save_for_backward(q, k, v, out, log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks = ctx.saved_tensors
        keys, values = repeat_kv(k, q), repeat_kv(v, q)
        shared = BlockwiseBackward(out, gradients[0], log_sum)
        dq = []
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
        for first in range(0, q.shape[2], QUERIES):
            part = Block(range(first, min(first + QUERIES, q.shape[2])), range(k.shape[2]))
            seen = ctx.mask.slice_queries(part.queries.start, part.queries.stop)
            more_dq, more_dk, more_dv = shared.of_block(part).block(part.of_queries(q), keys, values, seen, ctx.scoring)
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
            shared.sinks(sinks),
        )


def repeat_kv(x_BGTD: Tensor, q_BNSD: Tensor) -> Tensor:
    """Repeat keys or values for each query head, [B, G, T, D] -> [B, N, T, D]."""
    return x_BGTD.repeat_interleave(q_BNSD.shape[1] // x_BGTD.shape[1], dim=1)


def sum_over_kv_group(gradient_BNTD: Tensor, groups: int) -> Tensor:
    """Sum gradients over the query heads of each key/value group, [B, N, T, D] -> [B, G, T, D]."""
    return gradient_BNTD.view(gradient_BNTD.shape[0], groups, -1, *gradient_BNTD.shape[2:]).sum(dim=2)
