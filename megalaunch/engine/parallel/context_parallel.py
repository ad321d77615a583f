"""Context parallelism: each rank holds a part of every sample, and its queries reach the keys of the others.

A sample is cut into 2 x cp chunks; rank r holds chunks r and 2 cp - 1 - r, so that a causal mask gives all ranks
the same work. Shapes as in model/context.py; n and g are heads and groups of one rank after an all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalaunch.config.schema.parallel import ContextExchange, ParallelSpec
from megalaunch.engine.collectives import all_gather_async, all_to_all_async, reduce_scatter_async
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.attention.core import AttentionFn, causal_attention, masked_attention
from megalaunch.engine.model.attention.mask import AttentionMask, make_mask
from megalaunch.engine.model.attention.score_mod import PLAIN, ScoreMod
from megalaunch.engine.parallel.ring_attention import RingAttention

_SEQUENCE = 2  # the dim of tokens in [B, N, s, D]


@dataclass(frozen=True)
class ContextParallel:
    """The context of one rank; `exchanges` names one way for all layers, or one for each.

    `levels`: the axis inside (neighbours) and the one outside, for exchanges on two levels.
    """

    axis: Axis
    exchanges: tuple[ContextExchange, ...]
    levels: tuple[Axis, Axis] | None = None

    @classmethod
    def build(cls, parallel: ParallelSpec, mesh: Mesh) -> ContextParallel:
        """What a spec asks for."""
        chosen = parallel.cp_comm_type
        return cls(mesh.cp, chosen if isinstance(chosen, tuple) else (chosen,), mesh.cp_hierarchy)

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Where this rank's tokens stand in their sample, [s]."""
        return cp_positions(num_tokens * self.axis.size, self.axis, device)

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """One function for each way and window that is used, shared by its layers."""
        everyone = None if documents_Bs is None else all_gather_async(documents_Bs, 1, self.axis).wait()
        order = _all_positions(num_tokens * self.axis.size, self.axis, device)
        exchanges = self.exchanges if len(self.exchanges) > 1 else self.exchanges * len(windows)
        kinds = list(zip(exchanges, windows, strict=True))
        made = {kind: self._attend(kind[0], order, everyone, kind[1]) for kind in set(kinds)}
        return [made[kind] for kind in kinds]

    def _attend(self, way: ContextExchange, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
        if way != "a2a+p2p":
            return _ATTENTION_BY_COMM_TYPE[way](self.axis, order, everyone, window)
        assert self.levels is not None, "the checker asks for parallel.hierarchical_context_parallel_sizes"
        return _hierarchical_attention(*self.levels, order, everyone, window)


def cp_positions(length: int, axis: Axis, device: torch.device | None = None) -> Tensor:
    """The places of this rank's tokens in a sample of `length`: an early chunk, and the late one that balances it."""
    if axis.size == 1:
        return torch.arange(length, device=device)
    chunks = torch.arange(length, device=device).chunk(2 * axis.size)
    return torch.cat((chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]))


def _all_positions(length: int, axis: Axis, device: torch.device) -> Tensor:
    """The places of all ranks' tokens, in rank order, [S]."""
    return torch.cat([cp_positions(length, Axis(axis.name, axis.size, rank), device) for rank in range(axis.size)])


def _local_mask(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionMask:
    """Which keys of all ranks, in rank order, the queries of this one see."""
    num_tokens = len(order) // axis.size
    here = slice(axis.rank * num_tokens, (axis.rank + 1) * num_tokens)
    return make_mask(order[here], order, None if everyone is None else everyone[:, here], everyone, window)


def _all_gather_attention(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
    """Every rank gathers all keys and values; their gradients are summed where they belong (Llama 3)."""
    attend_all = masked_attention(_local_mask(axis, order, everyone, window))

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = PLAIN, /) -> Tensor:
        keys_values = torch.stack((k_BGsD, v_BGsD))
        whole: Tensor = _AllGather.apply(keys_values, axis)  # type: ignore[no-untyped-call]
        k_BGSD, v_BGSD = whole.unbind()
        return attend_all(q_BNsD, k_BGSD, v_BGSD, scoring)

    return attend


def _ring_attention(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
    """Keys and values travel round the ranks."""
    whole = _local_mask(axis, order, everyone, window)
    parts = zip(whole.k_positions.chunk(axis.size), whole.allowed.chunk(axis.size, dim=-1), strict=True)
    masks = tuple(AttentionMask(whole.q_positions, positions, mask) for positions, mask in parts)

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = PLAIN, /) -> Tensor:
        keys_values = torch.stack((k_BGsD, v_BGsD))
        out: Tensor = RingAttention.apply(q_BNsD, keys_values, masks, axis, scoring, scoring.sinks)  # type: ignore[no-untyped-call]
        return out

    return attend


def _ulysses_attention(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
    """Ranks trade tokens for heads: each attends over whole samples with N / cp heads (DeepSpeed-Ulysses)."""
    natural = order.argsort()
    local_attend: AttentionFn = partial(causal_attention, window=window)
    if everyone is not None:
        documents = everyone[:, natural]
        positions = torch.arange(len(order), device=order.device)
        local_attend = masked_attention(make_mask(positions, positions, documents, documents, window))

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = PLAIN, /) -> Tensor:
        heads = (q_BNsD, *(_repeat_kv_to(x, axis.size) for x in (k_BGsD, v_BGsD)))
        q_BnSD, k_BgSD, v_BgSD = (_to_heads(x, axis)[:, :, natural] for x in heads)
        out_BnSD = local_attend(q_BnSD, k_BgSD, v_BgSD, scoring.shard_heads(axis.rank, axis.size))
        return _to_tokens(out_BnSD[:, :, order], axis)

    return attend


def _hierarchical_attention(
    inner: Axis, outer: Axis, order: Tensor, everyone: Tensor | None, window: int | None
) -> AttentionFn:
    """Neighbours trade tokens for heads; ranks with the same heads form rings (LoongTrain)."""
    ring = _ring_attention(outer, order, everyone, window)

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = PLAIN, /) -> Tensor:
        heads = (q_BNsD, *(_repeat_kv_to(x, inner.size) for x in (k_BGsD, v_BGsD)))
        q_BntD, k_BgtD, v_BgtD = (_to_heads(x, inner) for x in heads)  # t: the tokens of all neighbours
        out_BntD = ring(q_BntD, k_BgtD, v_BgtD, scoring.shard_heads(inner.rank, inner.size))
        return _to_tokens(out_BntD, inner)

    return attend


_ATTENTION_BY_COMM_TYPE = {"allgather": _all_gather_attention, "a2a": _ulysses_attention, "p2p": _ring_attention}


def _repeat_kv_to(x_BGsD: Tensor, ranks: int) -> Tensor:
    """Groups repeated until every rank gets one."""
    groups = x_BGsD.shape[1]
    return x_BGsD if groups % ranks == 0 else x_BGsD.repeat_interleave(ranks // groups, dim=1)


def _to_heads(x_BNsD: Tensor, axis: Axis) -> Tensor:
    """[B, N, s, D] -> [B, n, S, D], tokens in rank order."""
    parts = torch.stack(x_BNsD.chunk(axis.size, dim=1))  # for each rank its heads
    found: Tensor = _AllToAll.apply(parts, axis)  # type: ignore[no-untyped-call]
    return torch.cat(found.unbind(), dim=_SEQUENCE)


def _to_tokens(x_BnSD: Tensor, axis: Axis) -> Tensor:
    """[B, n, S, D], tokens in rank order -> [B, N, s, D]."""
    parts = torch.stack(x_BnSD.chunk(axis.size, dim=_SEQUENCE))  # for each rank its tokens
    found: Tensor = _AllToAll.apply(parts, axis)  # type: ignore[no-untyped-call]
    return torch.cat(found.unbind(), dim=1)


class _AllGather(torch.autograd.Function):
    """Parts [2, B, G, s, D] joined along the tokens; backward: the ranks' gradients of one's own part, summed."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather_async(parts, _SEQUENCE + 1, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_async(gradients[0], _SEQUENCE + 1, ctx.axis).wait(), None


class _AllToAll(torch.autograd.Function):
    """Part i goes to rank i: [cp, ...] -> [cp, ...] by sender; its own backward."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_to_all_async(parts, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all_async(gradients[0], ctx.axis).wait(), None
