"""Ring attention: keys and values travel round the context-parallel ranks, one part ahead of the arithmetic.

Each part is a block of model/attention/blockwise.py. In the backward pass the gradients of keys and values travel with
them, and are back at their own rank after a full turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.collectives import ring_shift_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.blockwise import BlockwiseBackward, OnlineSoftmax, repeat_kv, sum_over_kv_group
from megalaunch.engine.model.attention.mask import AttentionMask
from megalaunch.engine.model.attention.score_mod import ScoreMod


class RingAttention(torch.autograd.Function):
    """q [B, N, s, D], kv [2, B, G, s, D] -> [B, N, s, D]; `sights` by the rank whose keys they show.

    `sinks` [N] are the scoring's, once more as a tensor that gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        masks: tuple[AttentionMask, ...],
        axis: Axis,
        scoring: ScoreMod,
        sinks: Tensor | None,
    ) -> Tensor:
        merged, held = OnlineSoftmax.empty(q, sinks), kv
        for turn in range(axis.size):
            coming = ring_shift_async(held, axis) if turn + 1 < axis.size else None
            keys, values = (repeat_kv(x, q) for x in held.unbind())
            merged.add(q, keys, values, masks[_owner(axis, turn)], scoring)
            held = coming.wait() if coming else held
        out = merged.output.to(q.dtype)
        ctx.axis, ctx.scoring, ctx.masks = axis, scoring, masks
        ctx.save_for_backward(q, kv, out, merged.log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, log_sum, sinks = ctx.saved_tensors
        axis, backward = ctx.axis, BlockwiseBackward.start(out, gradients[0], log_sum)
        dq = torch.zeros_like(q, dtype=torch.float32)
        held, dheld = kv, torch.zeros_like(kv, dtype=torch.float32)
        for turn in range(axis.size):
            coming = ring_shift_async(held, axis) if turn + 1 < axis.size else None
            keys, values = (repeat_kv(x, q) for x in held.unbind())
            more_dq, *more = backward.block(q, keys, values, ctx.masks[_owner(axis, turn)], ctx.scoring)
            dq += more_dq
            dheld = dheld + torch.stack([sum_over_kv_group(gradient, kv.shape[2]) for gradient in more])
            del more_dq, more
            dheld = ring_shift_async(dheld, axis).wait()
            held = coming.wait() if coming else held
        return dq.to(q.dtype), dheld.to(kv.dtype), None, None, None, backward.sinks(sinks)


def _owner(axis: Axis, turn: int) -> int:
    """Whose keys are here after `turn` shifts."""
    return (axis.rank - turn) % axis.size
