"""Context parallelism: each rank holds a shard of every sample's tokens; attention communicates over the cp axis.

A sample is cut into 2 cp chunks and rank r holds chunks r and 2 cp - 1 - r (head-tail balancing, as in Megatron), so
that a causal mask gives all ranks the same work. With q_r, k_r, v_r of the tokens of rank r, `parallel.cp_comm_type` is

allgather: K = all_gather(k_r), V = all_gather(v_r), out_r = attention(q_r, K, V)
           backward: dk_r = reduce_scatter(dK), dv_r = reduce_scatter(dV)
p2p:       ring attention: k_r and v_r are sent round the ranks (ring_attention.py)
a2a:       all_to_all of q, k, v from token shards to head shards, attention over all S tokens, all_to_all of the
           output back; backward: the same all-to-alls of the gradients
a2a+p2p:   a2a over the inner axis (neighbouring ranks), ring attention over the outer axis

Shapes as in model/attention/core.py; n and g are heads and groups of one rank after an all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import all_gather_async, all_to_all_async, reduce_scatter_async
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.attention.core import (
    DEFAULT_SCORE_MOD,
    AttentionFn,
    ScoreMod,
    causal_attention,
    masked_attention,
)
from megalaunch.engine.model.attention.mask import AttentionMask, make_mask
from megalaunch.engine.parallel.ring_attention import RingAttention
from megalaunch.schema.parallel import ContextCommType, ParallelSpec

_SEQUENCE = 2  # the dim of tokens in [B, N, s, D]


@dataclass(frozen=True)
class ContextParallel:
    """Context parallelism of one rank (`ContextParallelism`).

    `exchanges` holds one communication type (`parallel.cp_comm_type`) for all layers, or one per layer. `levels` are
    the inner axis (neighbouring ranks) and the outer axis of a2a+p2p.
    """

    axis: Axis
    exchanges: tuple[ContextCommType, ...]
    levels: tuple[Axis, Axis] | None = None

    @classmethod
    def build(cls, parallel: ParallelSpec, mesh: Mesh, mtp_depths: int = 0) -> ContextParallel:
        """Build from the parallel section of a spec. MTP depths communicate as the last layer does."""
        chosen = parallel.cp_comm_type
        exchanges = (*chosen, *chosen[-1:] * mtp_depths) if isinstance(chosen, tuple) else (chosen,)
        return cls(mesh.cp, exchanges, mesh.cp_hierarchy)

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position ids of this rank's `num_tokens` tokens in their sample, [s]."""
        return cp_positions(num_tokens * self.axis.size, self.axis, device)

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the attention function of each layer; layers of equal communication type and window share one.

        Args:
            num_tokens: s, the tokens of this rank in a row.
            documents_Bs: document ids of this rank's tokens, all-gathered over cp here; None: one document a sample.
            windows: the sliding window of each layer; None: all tokens.
            device: the device of queries, keys and masks.
        """
        everyone = None if documents_Bs is None else all_gather_async(documents_Bs, 1, self.axis).wait()
        order = _all_positions(num_tokens * self.axis.size, self.axis, device)
        exchanges = self.exchanges if len(self.exchanges) > 1 else self.exchanges * len(windows)
        kinds = list(zip(exchanges, windows, strict=True))
        made = {kind: self._attend(kind[0], order, everyone, kind[1]) for kind in set(kinds)}
        return [made[kind] for kind in kinds]

    def _attend(self, way: ContextCommType, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
        if way != "a2a+p2p":
            return _ATTENTION_BY_COMM_TYPE[way](self.axis, order, everyone, window)
        assert self.levels is not None, "the checker asks for parallel.hierarchical_context_parallel_sizes"
        return _hierarchical_attention(*self.levels, order, everyone, window)


def cp_positions(length: int, axis: Axis, device: torch.device | None = None) -> Tensor:
    """Return this rank's position ids in a sample of `length` tokens: chunk r, then chunk 2 cp - 1 - r."""
    if axis.size == 1:
        return torch.arange(length, device=device)
    chunks = torch.arange(length, device=device).chunk(2 * axis.size)
    return torch.cat((chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]))


def _all_positions(length: int, axis: Axis, device: torch.device) -> Tensor:
    """Return the position ids of all ranks' tokens, in rank order, [S]."""
    return torch.cat([cp_positions(length, Axis(axis.name, axis.size, rank), device) for rank in range(axis.size)])


def _local_mask(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionMask:
    """Return the attention mask of this rank's queries over the keys of all ranks, in rank order."""
    num_tokens = len(order) // axis.size
    here = slice(axis.rank * num_tokens, (axis.rank + 1) * num_tokens)
    return make_mask(order[here], order, None if everyone is None else everyone[:, here], everyone, window)


def _all_gather_attention(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
    """allgather: all-gather K and V; reduce-scatter their gradients (Llama 3)."""
    attend_all = masked_attention(_local_mask(axis, order, everyone, window))

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        gathered = apply_function(_AllGather, torch.cat((k_BGsD, v_BGsD), dim=-1), axis)
        k_BGSD, v_BGSD = torch.split_with_sizes(gathered, (k_BGsD.shape[-1], v_BGsD.shape[-1]), dim=-1)
        return attend_all(q_BNsD, k_BGSD, v_BGSD, scoring)

    return attend


def _ring_attention(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
    """p2p: ring attention, with one block of the attention mask per rank that owns keys."""
    local_mask = _local_mask(axis, order, everyone, window)
    parts = zip(local_mask.k_positions.chunk(axis.size), local_mask.allowed.chunk(axis.size, dim=-1), strict=True)
    masks = tuple(AttentionMask(local_mask.q_positions, positions, mask) for positions, mask in parts)

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        return apply_function(RingAttention, q_BNsD, k_BGsD, v_BGsD, masks, axis, scoring, scoring.sinks)

    return attend


def _ulysses_attention(axis: Axis, order: Tensor, everyone: Tensor | None, window: int | None) -> AttentionFn:
    """a2a: all-to-all from token shards to head shards; attend over all S tokens with N / cp heads (DeepSpeed-Ulysses).

    Tokens arrive in rank order. They are put into their natural order for attention, so that without documents the
    plain causal kernel applies, and back into rank order before the all-to-all of the output.
    """
    natural = order.argsort()
    local_attend: AttentionFn = partial(causal_attention, window=window)
    if everyone is not None:
        documents = everyone[:, natural]
        positions = torch.arange(len(order), device=order.device)
        local_attend = masked_attention(make_mask(positions, positions, documents, documents, window))

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        heads = (q_BNsD, *(_repeat_kv_to(x, axis.size) for x in (k_BGsD, v_BGsD)))
        q_BnSD, k_BgSD, v_BgSD = (_to_heads(x, axis)[:, :, natural] for x in heads)
        out_BnSD = local_attend(q_BnSD, k_BgSD, v_BgSD, scoring.shard_heads(axis.rank, axis.size))
        return _to_tokens(out_BnSD[:, :, order], axis)

    return attend


def _hierarchical_attention(
    inner: Axis, outer: Axis, order: Tensor, everyone: Tensor | None, window: int | None
) -> AttentionFn:
    """a2a+p2p: all-to-all over the inner axis, ring attention over the outer axis (LoongTrain).

    After the all-to-all the ranks of one outer group hold the same heads and different tokens: they form the ring.
    """
    ring = _ring_attention(outer, order, everyone, window)

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        heads = (q_BNsD, *(_repeat_kv_to(x, inner.size) for x in (k_BGsD, v_BGsD)))
        q_BntD, k_BgtD, v_BgtD = (_to_heads(x, inner) for x in heads)  # t: tokens of all ranks of the inner axis
        out_BntD = ring(q_BntD, k_BgtD, v_BgtD, scoring.shard_heads(inner.rank, inner.size))
        return _to_tokens(out_BntD, inner)

    return attend


_ATTENTION_BY_COMM_TYPE = {"allgather": _all_gather_attention, "a2a": _ulysses_attention, "p2p": _ring_attention}


def _repeat_kv_to(x_BGsD: Tensor, ranks: int) -> Tensor:
    """Repeat key/value groups so that each rank gets at least one in an all-to-all over heads."""
    groups = x_BGsD.shape[1]
    return x_BGsD if groups % ranks == 0 else x_BGsD.repeat_interleave(ranks // groups, dim=1)


def _to_heads(x_BNsD: Tensor, axis: Axis) -> Tensor:
    """All-to-all from token shards to head shards: [B, N, s, D] -> [B, n, S, D], tokens in rank order."""
    parts = torch.stack(x_BNsD.chunk(axis.size, dim=1))  # [cp, B, n, s, D]: part i has the heads of rank i
    found = apply_function(_AllToAll, parts, axis)
    return torch.cat(found.unbind(), dim=_SEQUENCE)


def _to_tokens(x_BnSD: Tensor, axis: Axis) -> Tensor:
    """All-to-all from head shards to token shards: [B, n, S, D], tokens in rank order -> [B, N, s, D]."""
    parts = torch.stack(x_BnSD.chunk(axis.size, dim=_SEQUENCE))  # [cp, B, n, s, D]: part i has the tokens of rank i
    found = apply_function(_AllToAll, parts, axis)
    return torch.cat(found.unbind(), dim=1)


class _AllGather(torch.autograd.Function):
    """All-gather of K and V along S, [B, G, s, F] -> [B, G, S, F]; backward: reduce-scatter of the gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather_async(parts, _SEQUENCE, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_async(gradients[0], _SEQUENCE, ctx.axis).wait(), None


class _AllToAll(torch.autograd.Function):
    """All-to-all along dim 0: part i goes to rank i, [cp, ...] -> [cp, ...] by sender. Backward is the same."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_to_all_async(parts, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all_async(gradients[0], ctx.axis).wait(), None
