"""Causal attention on a processor, a few queries at a time, so that their scores never leave its cache.

Torch's own kernel there multiplies more slowly than matmuls do, in bf16 by half. Scores are fp32, made again in the
backward pass from the log-sums of each softmax (Dao 2023). Key/value heads are not repeated: the queries of all heads
of a group are rows of one matmul.
Shapes: B batch, N query heads, G key/value groups, R = N / G, S tokens, D head dim, q queries of a block, T keys before
its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalaunch.engine.model.product import widens

_QUERIES = 32
_LONGEST = 1024  # of fp32: the scores of 32 queries over more keys outgrow the cache, and torch's kernel wins


def blocks_pay(q_BNSD: Tensor) -> bool:
    """Whether this is faster than torch's kernel: never in bf16 where the processor multiplies that itself."""
    tokens = q_BNSD.shape[2]
    if not q_BNSD.is_cpu or tokens == 1 or torch.compiler.is_compiling():  # a compiler would unroll the blocks
        return False
    return widens(q_BNSD) or (q_BNSD.dtype == torch.float32 and tokens <= _LONGEST)


def causal_on_processor(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float) -> Tensor:
    """Every token attends to itself and those before it: [B, N, S, D], token by token in memory."""
    out: Tensor = _Causal.apply(q_BNSD, k_BGSD, v_BGSD, scale)  # type: ignore[no-untyped-call]
    return out


class _Block(NamedTuple):
    """Queries from `first` to `end`, which see the keys before `end`."""

    first: int
    end: int

    def of(self, x_BGRSf: Tensor) -> Tensor:
        """Their rows of all heads of a group, [B G, R q, f]."""
        return x_BGRSf[:, :, :, self.first : self.end].flatten(2, 3).flatten(0, 1)

    def put(self, rows: Tensor, x_BGRSf: Tensor) -> None:
        """Into their places."""
        place = x_BGRSf[:, :, :, self.first : self.end]
        place.copy_(rows.view(place.shape))

    def hide(self, scores: Tensor, behind: Tensor) -> Tensor:
        """In place: no query sees a key behind it. Scores [B G, R q, T]; `behind`: -inf where one is, fp32 [q, q]."""
        width = self.end - self.first
        scores.view(scores.shape[0], -1, width, self.end)[..., self.first :].add_(behind[:width, :width])
        return scores


def _blocks(tokens: int) -> Iterator[_Block]:
    return (_Block(first, min(first + _QUERIES, tokens)) for first in range(0, tokens, _QUERIES))


def _behind(x: Tensor) -> Tensor:
    """What hides the keys behind the queries of a block, [q, q]."""
    return x.new_full((_QUERIES, _QUERIES), -torch.inf, dtype=torch.float32).triu_(1)


def _rows(x_BGSD: Tensor) -> Tensor:
    """Keys or values in fp32, [B G, S, D]."""
    return x_BGSD.float().flatten(0, 1)


def _in_groups(x_BNSf: Tensor, groups: int) -> Tensor:
    """[B, G, R, S, f]."""
    return x_BNSf.view(x_BNSf.shape[0], groups, -1, *x_BNSf.shape[2:])


def _token_by_token(x_BNSD: Tensor) -> Tensor:
    """An empty tensor of its shape and format, whose heads lie side by side as a projection reads them."""
    batch, heads, tokens, width = x_BNSD.shape
    return x_BNSD.new_empty(batch, tokens, heads, width).transpose(1, 2)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values, groups = _rows(k), _rows(v), k.shape[1]
        queries, out, behind = _in_groups(q.float(), groups), _token_by_token(q), _behind(q)
        keys_DT = keys.mT.contiguous()  # matmuls of so few rows are a quarter faster over it
        log_sum = q.new_empty(*q.shape[:-1], 1, dtype=torch.float32)
        for block in _blocks(q.shape[2]):
            rows = block.of(queries) * scale
            scores = block.hide(torch.bmm(rows, keys_DT[..., : block.end]), behind)
            largest = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            block.put(torch.bmm(weights, values[:, : block.end]).div_(total), _in_groups(out, groups))
            block.put(largest.add_(total.log_()), _in_groups(log_sum, groups))
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, log_sum = ctx.saved_tensors
        keys, values, groups = _rows(k), _rows(v), k.shape[1]
        dout = gradients[0].float()
        share = (dout * out).sum(dim=-1, keepdim=True)  # what the normalisation takes away
        queries, douts, shares, log_sums = (_in_groups(x, groups) for x in (q.float(), dout, share, log_sum))
        dq, dkeys, dvalues = _token_by_token(q), torch.zeros_like(keys), torch.zeros_like(values)
        keys_DT, values_DT, behind = keys.mT.contiguous(), values.mT.contiguous(), _behind(q)
        for block in _blocks(q.shape[2]):
            rows, drows, seen = block.of(queries) * ctx.scale, block.of(douts), slice(block.end)
            scores = torch.bmm(rows, keys_DT[..., seen]).sub_(block.of(log_sums))
            weights = block.hide(scores, behind).exp_()
            dvalues[:, seen].baddbmm_(weights.mT, drows)
            dscores = torch.bmm(drows, values_DT[..., seen]).sub_(block.of(shares)).mul_(weights)
            block.put(torch.bmm(dscores, keys[:, seen]).mul_(ctx.scale), _in_groups(dq, groups))
            dkeys[:, seen].baddbmm_(dscores.mT, rows)
        return dq, _token_by_token(k).copy_(dkeys.view(k.shape)), _token_by_token(v).copy_(dvalues.view(v.shape)), None
