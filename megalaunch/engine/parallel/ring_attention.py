"""Ring attention over the cp axis: ranks send keys and values round a ring while they compute attention blocks.

Liu et al. 2023. A rank holds the keys and values of one rank after another, and computes attention of its queries over
them (model/attention/partial_attention.py). Forward begins with its own keys and sends each to rank r + 1 while it
computes with them. Backward begins with the keys that forward ended with, of rank r + 1, and sends them back to rank
r - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.collectives import AsyncCollective, ring_shift_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.online_softmax import BlockwiseBackward, OnlineSoftmax
from megalaunch.engine.model.attention.partial_attention import PartialAttention
from megalaunch.engine.model.attention.score_mod import ScoreMod


class RingAttention(torch.autograd.Function):
    """Ring attention: q [B, N, s, D], k [B, G, s, D], v [B, G, s, F] -> [B, N, s, F].

    Forward:   lse_r = log sum_j sum exp(q_r k_j^T),  out_r = sum_j exp(q_r k_j^T - lse_r) v_j  (online softmax, fp32)
    Backward:  dq_r = sum_j dq_rj,  dk_j = sum_r dk_rj,  dv_j = sum_r dv_rj

    with mask, scale and score modification applied to q k^T. Both passes make cp turns; the send/recv of the next keys
    and values overlaps with the block of the current ones. Only q_r, k_j, v_j of forward's last turn, out_r and lse_r
    are saved for backward: backward sends the keys and values round again and recomputes the scores. The partial sums
    dk_j and dv_j (fp32) follow k_j and v_j one turn later: their send/recv overlaps with the next block, whose
    gradients have a buffer of their own and are added to what arrives. Rank j's own keys come last, so that dk_j and
    dv_j are complete there after cp - 1 shifts, none of which is left over after the last block.

    `parts[j]` computes attention of this rank's queries over the keys of rank j. `sinks` [N] repeats the sinks of
    `scoring` as a tensor input, so that autograd gives them a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: tuple[PartialAttention, ...],
        axis: Axis,
        scoring: ScoreMod,
        sinks: Tensor | None,
    ) -> Tensor:
        kv = torch.cat((k.flatten(), v.flatten()))  # one send/recv for both
        merged, kv_block, shapes = OnlineSoftmax.empty(q, v.shape[-1], sinks), kv, (k.shape, v.shape)
        for turn in range(axis.size):
            # Start the send/recv before the block, so that they overlap; the last turn has nothing to send.
            coming = ring_shift_async(kv_block, axis) if turn + 1 < axis.size else None
            part = parts[(axis.rank - turn) % axis.size]
            part.add_output(merged, q, *_unpack(kv_block, shapes), scoring)
            kv_block = coming.wait() if coming else kv_block
        out = merged.output.to(q.dtype)
        ctx.axis, ctx.scoring, ctx.parts, ctx.shapes = axis, scoring, parts, shapes
        ctx.save_for_backward(q, kv_block, out, merged.log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, kv_block, out, log_sum, sinks = ctx.saved_tensors
        axis, shared = ctx.axis, BlockwiseBackward(out, gradients[0], log_sum)
        dq = torch.zeros_like(q, dtype=torch.float32)
        sums: Tensor | None = None
        coming_sums: AsyncCollective | None = None
        for turn in range(axis.size):
            is_last = turn + 1 == axis.size
            coming = None if is_last else ring_shift_async(kv_block, axis, step=-1)
            part = ctx.parts[(axis.rank + 1 + turn) % axis.size]
            qkv = q, *_unpack(kv_block, ctx.shapes)
            of_block = torch.zeros_like(kv_block, dtype=torch.float32)
            part.add_gradients(qkv, ctx.scoring, shared, dq, *_unpack(of_block, ctx.shapes))
            # Until here `sums` keeps alive the tensor that is being sent.
            sums = of_block.add_(coming_sums.wait()) if coming_sums else of_block
            coming_sums = None if is_last else ring_shift_async(sums, axis, step=-1)
            kv_block = coming.wait() if coming else kv_block
        assert sums is not None, "an axis has a rank"
        dk, dv = _unpack(sums.to(kv_block.dtype), ctx.shapes)
        return dq.to(q.dtype), dk, dv, None, None, None, shared.sinks(sinks)


def _unpack(kv: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values in one flat tensor."""
    k, v = torch.split_with_sizes(kv, [shape.numel() for shape in shapes])
    return k.view(shapes[0]), v.view(shapes[1])
