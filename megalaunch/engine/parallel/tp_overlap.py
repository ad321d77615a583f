"""Tensor-parallel communication overlap: all-gather and reduce-scatter as rings whose steps overlap with matmuls.

Wang et al. 2023; Megatron's `--tp-comm-overlap`. A rank multiplies one shard of the sequence while the send/recv of the
next one runs, so that only the part of a transfer that takes longer than its matmul is exposed.
Shapes: B batch, S all tokens, s = S / n the tokens of a rank (n = tp), H hidden, f a rank's features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.collectives import AsyncCollective, all_gather_async, reduce_scatter_async, ring_shift_async
from megalaunch.engine.mesh import Axis
from megalaunch.kernels.matmul import matmul, needs_grad, use_fp32_matmul

_SEQUENCE = 1  # the dim of S in [B, S, H]


class AllGatherMatmulRing(torch.autograd.Function):
    """Column-parallel linear layers with a ring all-gather: [B, s, H] -> [B, S, f] each. W_i is this rank's shard.

    Forward:   y_i[j] = x_j W_i^T for the shards j = r, r - 1, ... (mod n): at each step rank r multiplies the shard x_j
               that it holds and meanwhile sends it to rank r + 1
    Backward:  dx_r = reduce_scatter(sum_i dy_i W_i),  dW_i = dy_i^T all_gather(x_r)

    Only the shard x_r is saved for backward. Its all-gather overlaps with the matmul of dx, and the reduce-scatter of
    dx with the matmuls of dW: a full matmul hides each collective, so backward needs no ring.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.save_for_backward(x, *weights)
        batch, length, _ = x.shape
        # Allocate the full output and fill it shard by shard: torch forbids in-place changes of views that a Function
        # returns, and a loss changes its logits in place.
        outputs = [x.new_empty(batch, axis.size * length, weight.shape[0]) for weight in weights]
        divided = [output.view(batch, axis.size, length, -1) for output in outputs]
        shard = x.contiguous()
        for step in range(axis.size):
            coming = _next(shard, axis, step)
            for output, weight in zip(divided, weights, strict=True):
                _multiply(shard, weight.T, output[:, (axis.rank - step) % axis.size])
            shard = coming.wait() if coming else shard
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted = [needs_grad(ctx, number) for number in range(1, 1 + len(weights))]
        gathering = all_gather_async(x, _SEQUENCE, ctx.axis) if any(wanted) else None
        reducing = None
        if needs_grad(ctx, 0):
            dx = matmul(dys[0], weights[0])
            for dy, weight in zip(dys[1:], weights[1:], strict=True):
                dx = matmul(dy, weight, onto=dx)
            reducing = reduce_scatter_async(dx, _SEQUENCE, ctx.axis)
            del dx  # a copy is in flight
        rows = (gathering.wait() if gathering else x).flatten(0, 1)
        gathering = None  # frees the buffer of its parts before the matmuls of dW
        dweights = [matmul(dy.flatten(0, 1).T, rows) if w else None for dy, w in zip(dys, wanted, strict=True)]
        return reducing.wait() if reducing else None, None, *dweights


class MatmulReduceScatterRing(torch.autograd.Function):
    """Row-parallel linear layer with a ring reduce-scatter: [B, S, f] -> [B, s, H]. W is this rank's shard of features.

    Forward:   y_j = sum_r x_r[j] W_r^T: the partial sum of shard j is sent from rank j + 1 round the ring to rank j;
               each rank adds its product, which it computes while it receives the partial sum
    Backward:  dx_r[j] = dy_j W_r as the shards dy_j arrive in a ring all-gather,  dW_r = dy^T x_r after the last one

    Zero-bubble schedules run backward twice. The pass for dx alone saves the gathered dy for the pass for dW, which
    all-gathers only if it gets another dy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, weight: Tensor) -> Tensor:
        ctx.axis, ctx.saved_dy = axis, None
        ctx.save_for_backward(x, weight)
        parts = x.reshape(x.shape[0], axis.size, -1, x.shape[2])
        coming: AsyncCollective | None = None
        for step in range(axis.size):
            # The matmul runs while the partial sum that the last step sent is received.
            total = x.new_empty(x.shape[0], parts.shape[2], weight.shape[0])
            _multiply(parts[:, (axis.rank - 1 - step) % axis.size], weight.T, total)
            if coming is not None:
                total += coming.wait()
            coming = _next(total, axis, step)
        return total

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        axis: Axis = ctx.axis
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = needs_grad(ctx, 0), needs_grad(ctx, 1)
        saved_dy: tuple[Tensor, Tensor] | None = ctx.saved_dy
        ctx.saved_dy = None
        if not wants_x:
            # Zero-bubble schedules pass the same gradient tensor to both backward passes.
            dy = saved_dy[1] if saved_dy and saved_dy[0] is dys[0] else all_gather_async(dys[0], _SEQUENCE, axis).wait()
            return None, None, matmul(dy.flatten(0, 1).T, x.flatten(0, 1))
        shard = dys[0].contiguous()
        batch, length, hidden = shard.shape
        dx = x.new_empty(batch, axis.size, length, weight.shape[1])
        dy = x.new_empty(batch, axis.size, length, hidden)
        for step in range(axis.size):
            coming = _next(shard, axis, step)
            owner = (axis.rank - step) % axis.size
            _multiply(shard, weight, dx[:, owner])
            dy[:, owner] = shard
            shard = coming.wait() if coming else shard
        dweight = matmul(dy.view(-1, hidden).T, x.flatten(0, 1)) if wants_weight else None
        if ctx.needs_input_grad[2] and not wants_weight:
            ctx.saved_dy = dys[0], dy.flatten(1, 2)
        return dx.flatten(1, 2), None, dweight


def _next(shard: Tensor, axis: Axis, step: int) -> AsyncCollective | None:
    """Start to send `shard` to the next rank and receive from the previous one; None in the last step of the ring."""
    return ring_shift_async(shard, axis) if step < axis.size - 1 else None


def _multiply(x_BsK: Tensor, matrix_KN: Tensor, out_BsN: Tensor) -> None:
    """Write x matrix to `out`, one sample at a time: `out` is contiguous within a sample, not across samples."""
    if use_fp32_matmul(x_BsK):
        out_BsN.copy_(matmul(x_BsK, matrix_KN))
        return
    for x, out in zip(x_BsK, out_BsN, strict=True):
        torch.mm(x, matrix_KN, out=out)
