"""Attention over the blocks of a mask, on one device.

Forward:   lse = log sum_b sum exp(q k_b^T),  out = sum_b exp(lse_b - lse) out_b   (online softmax, fp32)
Backward:  dq, dk, dv = sums over the blocks; each is computed from out, dout and lse of all blocks

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.attention.block_kernels import BlockBackend, BlockInputs
from megalaunch.engine.model.attention.block_mask import BlockMask
from megalaunch.engine.model.attention.online_softmax import BlockwiseBackward, OnlineSoftmax
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod


def blockwise_attention(mask: BlockMask, kernel: BlockBackend = "auto") -> AttentionFn:
    """Return attention over the blocks of the mask; `kernel` as of `fused_kernel`."""

    def attend(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        return apply_function(_BlockAttention, q_BNSD, k_BGTD, v_BGTD, mask, kernel, scoring, scoring.sinks)

    return attend


def add_blocks(merged: OnlineSoftmax, inputs: BlockInputs) -> None:
    """Compute all blocks and merge them."""
    for block in inputs.blocks:
        merged.merge(block, *inputs.attend(block))


def add_gradients(inputs: BlockInputs, shared: BlockwiseBackward, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients of all blocks to these sums, in fp32."""
    for block in inputs.blocks:
        sums = block.of_queries(dq), block.of_keys(dk), block.of_keys(dv)
        for total, part in zip(sums, inputs.gradients(block, shared), strict=True):
            total.add_(part)


class _BlockAttention(torch.autograd.Function):
    """Attention over the blocks of a mask. `sinks` are those of `scoring`: a direct input gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        kernel: BlockBackend,
        scoring: ScoreMod,
        sinks: Tensor | None,
    ) -> Tensor:
        merged = OnlineSoftmax.empty(q, v.shape[-1], sinks)
        add_blocks(merged, BlockInputs(q, k, v, mask, scoring, kernel))
        out = merged.output.to(q.dtype)
        ctx.mask, ctx.scoring, ctx.kernel = mask, scoring, kernel
        ctx.save_for_backward(q, k, v, out, merged.log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, sinks = ctx.saved_tensors
        shared = BlockwiseBackward(out, gradients[0], log_sum)
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        add_gradients(BlockInputs(q, k, v, ctx.mask, ctx.scoring, ctx.kernel), shared, dq, dk, dv)
        dsinks = shared.sinks(sinks)
        dq = dq.to(q.dtype)  # one after another: no two sums in fp32 and their copies are there at once
        dk = dk.to(k.dtype)
        dv = dv.to(v.dtype)
        return dq, dk, dv, None, None, None, dsinks
