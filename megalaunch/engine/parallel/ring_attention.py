"""Ring attention over the cp axis: ranks send keys and values round a ring while they compute attention blocks.

Liu et al. 2023. At turn t rank r holds the keys and values of rank j = (r - t) mod cp, and computes the blocks of its
queries with them (model/attention/block_mask.py). It sends them to rank r + 1 while it computes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.collectives import ring_shift_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.block_attention import add_blocks, add_gradients
from megalaunch.engine.model.attention.block_kernels import BlockBackend, BlockInputs
from megalaunch.engine.model.attention.block_mask import BlockMask
from megalaunch.engine.model.attention.online_softmax import BlockwiseBackward, OnlineSoftmax
from megalaunch.engine.model.attention.score_mod import ScoreMod


class RingAttention(torch.autograd.Function):
    """Ring attention: q [B, N, s, D], k [B, G, s, D], v [B, G, s, F] -> [B, N, s, F].

    Forward:   lse_r = log sum_j sum exp(q_r k_j^T),  out_r = sum_j exp(q_r k_j^T - lse_r) v_j  (online softmax, fp32)
    Backward:  dq_r = sum_j dq_rj,  dk_j = sum_r dk_rj,  dv_j = sum_r dv_rj

    with mask, scale and score modification applied to q k^T. Each out_rj has a fused kernel where there is one
    (model/attention/block_kernels.py). Both passes make cp turns; the send/recv of the next keys
    and values overlaps with the block of the current ones. Only q_r, k_r, v_r, out_r and lse_r are saved for backward:
    backward sends the keys and values round again and recomputes the scores. The partial sums dk_j and dv_j (fp32)
    move with k_j and v_j. Their send/recv waits for the block, which adds to them, and after cp shifts they are
    complete on rank j.

    `masks[j]` is the attention mask of this rank's queries over the keys of rank j. `sinks` [N] repeats the sinks of
    `scoring` as a tensor input, so that autograd gives them a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: tuple[BlockMask, ...],
        axis: Axis,
        kernel: BlockBackend,
        scoring: ScoreMod,
        sinks: Tensor | None,
    ) -> Tensor:
        kv = torch.cat((k.flatten(), v.flatten()))  # one send/recv for both
        merged, kv_block, shapes = OnlineSoftmax.empty(q, v.shape[-1], sinks), kv, (k.shape, v.shape)
        for turn in range(axis.size):
            # Start the send/recv before the block, so that they overlap; the last turn has nothing to send.
            coming = ring_shift_async(kv_block, axis) if turn + 1 < axis.size else None
            add_blocks(merged, BlockInputs(q, *_unpack(kv_block, shapes), masks[_owner(axis, turn)], scoring, kernel))
            kv_block = coming.wait() if coming else kv_block
        out = merged.output.to(q.dtype)
        ctx.axis, ctx.scoring, ctx.masks, ctx.shapes, ctx.kernel = axis, scoring, masks, shapes, kernel
        ctx.save_for_backward(q, kv, out, merged.log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, log_sum, sinks = ctx.saved_tensors
        axis, shared = ctx.axis, BlockwiseBackward(out, gradients[0], log_sum)
        dq = torch.zeros_like(q, dtype=torch.float32)
        kv_block, dkv_block = kv, torch.zeros_like(kv, dtype=torch.float32)
        for turn in range(axis.size):
            coming = ring_shift_async(kv_block, axis) if turn + 1 < axis.size else None
            mask = ctx.masks[_owner(axis, turn)]
            inputs = BlockInputs(q, *_unpack(kv_block, ctx.shapes), mask, ctx.scoring, ctx.kernel)
            add_gradients(inputs, shared, dq, *_unpack(dkv_block, ctx.shapes))
            # In the last turn too: this shift returns the sums to the rank that owns the keys.
            dkv_block = ring_shift_async(dkv_block, axis).wait()
            kv_block = coming.wait() if coming else kv_block
        dk, dv = _unpack(dkv_block.to(kv.dtype), ctx.shapes)
        return dq.to(q.dtype), dk, dv, None, None, None, None, shared.sinks(sinks)


def _unpack(kv: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values in one flat tensor."""
    k, v = torch.split_with_sizes(kv, [shape.numel() for shape in shapes])
    return k.view(shapes[0]), v.view(shapes[1])


def _owner(axis: Axis, turn: int) -> int:
    """Return the rank whose keys this rank holds after `turn` shifts."""
    return (axis.rank - turn) % axis.size
