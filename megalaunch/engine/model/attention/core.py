"""Core attention, between the projections: softmax(q k^T) v, with its score modification and its blockwise form.

Context parallelism implements the interface defined here; without it every rank holds all tokens of its samples.

Blockwise attention merges blocks of keys by online softmax (log-sum-exp; Liu et al. 2023) and recomputes scores in
backward (Dao 2023), so that none are saved. Scores are fp32, and tensors of their size are modified in place.

Shapes: B batch, N query heads, G key/value groups, S queries or all tokens of a sample, s a rank's shard of them, T
keys, D head dim; that of values, and so of the output, may differ from that of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.attention.mask import AttentionMask, make_mask
from megalaunch.engine.model.dropout import hash_ids, keep_mask, mix_seed
from megalaunch.kernels.causal_attention import causal_sdpa, masked_sdpa


@dataclass(frozen=True)
class ScoreMod:
    """How attention scores become weights.

    Args:
        scale: The factor of q k; None: 1 / sqrt(D).
        soft_cap: The cap of cap * tanh(score / cap) (Gemma 2); None: no cap.
        sinks: One logit per head, [N], that joins the softmax and has no value vector (gpt-oss).
        dropout_seeds: Seeds of the dropout masks, [B, N]; None: no dropout.
        dropout: The probability with which a weight is dropped.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    dropout_seeds: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_default(self) -> bool:
        """True if torch's own attention supports it: there is no soft cap, sink or dropout."""
        return self.soft_cap is None and self.sinks is None and self.dropout_seeds is None

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

    def shard_heads(self, rank: int, ranks: int) -> ScoreMod:
        """Return the score modification of rank `rank`'s shard of the heads."""
        sinks = None if self.sinks is None else self.sinks.chunk(ranks)[rank]
        seeds = None if self.dropout_seeds is None else self.dropout_seeds.chunk(ranks, dim=1)[rank]
        return replace(self, sinks=sinks, dropout_seeds=seeds)


DEFAULT_SCORE_MOD = ScoreMod()


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap): bounded by `cap`, and nearly x for small x."""
    return cap * torch.tanh(x / cap)


class AttentionFn(Protocol):
    """Core attention, between the projections: softmax(q k^T) v under a causal mask."""

    def __call__(
        self, q_BNsD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /
    ) -> Tensor:
        """Attend with queries [B, N, s, D] to keys and values [B, G, T, D] -> [B, N, s, D]."""


class ContextParallelism(Protocol):
    """How the tokens of a sample are sharded over context-parallel ranks, and attention over the shards."""

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position ids in the sample of this rank's `num_tokens` tokens, [s] int64."""

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the causal attention of each layer.

        Args:
            num_tokens: The number s of this rank's tokens.
            documents_Bs: Document ids: tokens attend within their document; None: to all earlier tokens.
            windows: The sliding window of each layer in tokens; None: full attention.
            device: The device of queries, keys and `documents_Bs`, on which masks and position ids are created.
        """


class NoContextParallel:
    """No context parallelism: every rank holds all tokens of its samples."""

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return 0, 1, ..."""
        return torch.arange(num_tokens, device=device)

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the attention of each layer; layers with the same window share one."""
        made = {window: self._attend(num_tokens, documents_Bs, window, device) for window in set(windows)}
        return [made[window] for window in windows]

    def _attend(
        self, num_tokens: int, documents_Bs: Tensor | None, window: int | None, device: torch.device
    ) -> AttentionFn:
        if documents_Bs is None:
            return partial(causal_attention, window=window)
        positions = self.position_ids(num_tokens, device)
        return masked_attention(make_mask(positions, positions, documents_Bs, documents_Bs, window))


NO_CP = NoContextParallel()


def causal_attention(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /, window: int | None = None
) -> Tensor:
    """Return causal attention of the last S of T positions, over all or the last `window` positions: [B, N, S, D]."""
    if window is not None and q_BNSD.shape[2] == 1:
        k_BGTD, v_BGTD, window = k_BGTD[:, :, -window:], v_BGTD[:, :, -window:], None
    queries, keys = q_BNSD.shape[2], k_BGTD.shape[2]
    if queries in (1, keys) and scoring.is_default and (window is None or window >= keys):
        return causal_sdpa(q_BNSD, k_BGTD, v_BGTD, scoring.scale)
    positions = torch.arange(keys, device=q_BNSD.device)
    mask = AttentionMask(positions[keys - queries :], positions, window=window)
    return attention(q_BNSD, k_BGTD, v_BGTD, mask, scoring)


def masked_attention(mask: AttentionMask) -> AttentionFn:
    """Return attention over the keys that the mask allows, on the mask's device."""

    def attend(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        return attention(q_BNSD, k_BGTD, v_BGTD, mask, scoring)

    return attend


_QUERIES = 512  # per block, on one device


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


@dataclass(frozen=True)
class BlockwiseBackward:
    """Inputs that the gradients of all blocks share.

    `dout` is the gradient of the output in fp32, `share` = rowsum(dout * out), `log_sum` the log-sum-exp of all scores.
    """

    dout: Tensor
    share: Tensor
    log_sum: Tensor

    @classmethod
    def start(cls, out: Tensor, dout: Tensor, log_sum: Tensor) -> BlockwiseBackward:
        """Compute `share` [B, N, S, 1], which the softmax's normalisation subtracts from its weights' gradients."""
        dout = dout.float()
        return cls(dout, (dout * out.float()).sum(dim=-1, keepdim=True), log_sum)

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
        dweights = apply_dropout(self.dout @ values.mT, dropout_mask, scoring)
        dscores = dweights.sub_(self.share).mul_(weights).mul_(scoring.softmax_scale(q))
        if capping is not None:
            dscores.mul_(capping)
        return dscores @ keys, dscores.mT @ q.float(), apply_dropout(weights, dropout_mask, scoring).mT @ self.dout

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Return the sinks' gradient, -sum(exp(sink - L) share): a sink adds to the sum and has no value vector."""
        if sinks is None:
            return None
        weights = (sinks.float()[:, None, None] - self.log_sum).exp()
        return -(weights * self.share).sum(dim=(0, 2, 3)).to(sinks.dtype)


def apply_dropout(weights: Tensor, dropout_mask: Tensor | None, scoring: ScoreMod) -> Tensor:
    """Apply dropout in place: zero the weights that are not kept, and divide the others by 1 - dropout."""
    return weights if dropout_mask is None else weights.mul_(dropout_mask).mul_(1 / (1 - scoring.dropout))


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
        for first in range(0, q.shape[2], _QUERIES):
            part = slice(first, first + _QUERIES)
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
        shared = BlockwiseBackward.start(out, gradients[0], log_sum)
        dq = []
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
        for first in range(0, q.shape[2], _QUERIES):
            part = slice(first, first + _QUERIES)
            backward = BlockwiseBackward(*(x[:, :, part] for x in (shared.dout, shared.share, log_sum)))
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
            shared.sinks(sinks),
        )


def repeat_kv(x_BGTD: Tensor, q_BNSD: Tensor) -> Tensor:
    """Repeat keys or values for each query head, [B, G, T, D] -> [B, N, T, D]."""
    return x_BGTD.repeat_interleave(q_BNSD.shape[1] // x_BGTD.shape[1], dim=1)


def sum_over_kv_group(gradient_BNTD: Tensor, groups: int) -> Tensor:
    """Sum gradients over the query heads of each key/value group, [B, N, T, D] -> [B, G, T, D]."""
    return gradient_BNTD.view(gradient_BNTD.shape[0], groups, -1, *gradient_BNTD.shape[2:]).sum(dim=2)
