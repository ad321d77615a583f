"""Ring attention: keys and values travel round the context-parallel ranks, one part ahead of the arithmetic.

Each part's result is merged by its log-sum-exp (Liu et al. 2023; Dao 2023 for the backward pass). On the way back
the gradients of keys and values travel with them, and are home after a full turn. Scores are fp32;
what is as large as they are is changed in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.collectives import start_shift
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.scores import Scoring


class RingAttention(torch.autograd.Function):
    """q [B, N, s, D], kv [2, B, G, s, D], masks [cp, ..., s, s] by the rank whose keys they show -> [B, N, s, D].

    `sinks` [N] are the scoring's, once more as a tensor that gets a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, masks: Tensor, axis: Axis, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        total = torch.zeros_like(q, dtype=torch.float32)
        log_sum = torch.full((*q.shape[:-1], 1), -torch.inf, device=q.device)
        if sinks is not None:
            log_sum = log_sum.maximum(sinks.float()[:, None, None])
        held = kv
        for turn in range(axis.size):
            coming = start_shift(held, axis) if turn + 1 < axis.size else None
            keys, values = _grouped(held, q)
            scores = scoring.scores(q, keys).masked_fill_(~masks[_owner(axis, turn)], -torch.inf)
            part_sum = scores.logsumexp(dim=-1, keepdim=True)
            merged = torch.logaddexp(log_sum, part_sum)
            weights = scores.sub_(merged.clamp(min=torch.finfo(torch.float32).min)).exp_()
            total = total * (log_sum - merged).exp().nan_to_num() + weights @ values.float()
            log_sum = merged
            del scores, weights
            held = coming.wait() if coming else held
        out = total.to(q.dtype)
        ctx.axis, ctx.scoring, ctx.scale = (
            axis,
            scoring,
            q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale,
        )
        ctx.save_for_backward(q, kv, masks, out, log_sum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, masks, out, log_sum, sinks = ctx.saved_tensors
        axis, scoring, dout = ctx.axis, ctx.scoring, gradients[0].float()
        share = (dout * out.float()).sum(dim=-1, keepdim=True)
        dq = torch.zeros_like(q, dtype=torch.float32)
        held, dheld = kv, torch.zeros_like(kv, dtype=torch.float32)
        for turn in range(axis.size):
            coming = start_shift(held, axis) if turn + 1 < axis.size else None
            keys, values = (x.float() for x in _grouped(held, q))
            scores = scoring.scores(q, keys)
            capping = None if scoring.soft_cap is None else 1 - (scores / scoring.soft_cap).square()
            weights = scores.masked_fill_(~masks[_owner(axis, turn)], -torch.inf).sub_(log_sum).exp_()
            dscores = (dout @ values.mT).sub_(share).mul_(weights).mul_(ctx.scale)
            if capping is not None:
                dscores.mul_(capping)
            dq += dscores @ keys
            dheld = dheld + torch.stack((_ungrouped(dscores.mT @ q.float(), kv), _ungrouped(weights.mT @ dout, kv)))
            del scores, weights, dscores, capping
            dheld = start_shift(dheld, axis).wait()
            held = coming.wait() if coming else held
        dsinks = None
        if sinks is not None:  # its value is 0, so that only its share of the sum is left
            dsinks = -((sinks.float()[:, None, None] - log_sum).exp() * share).sum(dim=(0, 2, 3)).to(sinks.dtype)
        return dq.to(q.dtype), dheld.to(kv.dtype), None, None, None, dsinks


def _owner(axis: Axis, turn: int) -> int:
    """Whose keys are here after `turn` shifts."""
    return (axis.rank - turn) % axis.size


def _grouped(kv: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    """Keys and values for each query head."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[2], dim=2).unbind()


def _ungrouped(gradient: Tensor, kv: Tensor) -> Tensor:
    """The gradient of a group: the sum over the heads it serves."""
    groups = kv.shape[2]
    return gradient.view(gradient.shape[0], groups, -1, *gradient.shape[2:]).sum(dim=2)
