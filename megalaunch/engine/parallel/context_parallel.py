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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import all_gather_async, all_to_all_async, reduce_scatter_async
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.attention.backends import RUN_KERNELS
from megalaunch.engine.model.attention.block_attention import blockwise_attention
from megalaunch.engine.model.attention.block_kernels import BlockBackend
from megalaunch.engine.model.attention.block_mask import Runs, make_block_mask, positions_of
from megalaunch.engine.model.attention.core import whole_sample_attention
from megalaunch.engine.model.attention.documents import (
    DocumentLengths,
    document_lengths,
    documents_by_row,
    host_document_ids,
)
from megalaunch.engine.model.attention.flex_attention import FlexMask, flex_attention_by_position
from megalaunch.engine.model.attention.package_attention import package_attention
from megalaunch.engine.model.attention.partial_attention import BlockwisePart, FlexPart, PartialAttention
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod
from megalaunch.engine.model.dropout import TokenPlaces
from megalaunch.engine.parallel.ring_attention import RingAttention
from megalaunch.engine.parallel.te_ring_attention import te_ring_attention
from megalaunch.plan.attention_choice import TakenBackend, TakenBackends, taken_backends
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ContextCommType

_SEQUENCE = 2  # the dim of tokens in [B, N, s, D]

Documents = tuple[tuple[int, ...], ...]
"""The lengths of the documents of each row."""


@dataclass(frozen=True)
class ContextParallel:
    """Context parallelism of one rank (`ContextParallelism`).

    `exchanges` holds one communication type (`parallel.cp_comm_type`) for all layers, or one per layer. `levels` are
    the inner axis (neighbouring ranks) and the outer axis of a2a+p2p. `lengths` reads document ids; fake tensors need
    another function. `backends` are the kernels of attention.
    """

    axis: Axis
    exchanges: tuple[ContextCommType, ...]
    levels: tuple[Axis, Axis] | None = None
    lengths: DocumentLengths = document_lengths
    backends: TakenBackends = TakenBackends()
    _library_rings: dict[Axis, AttentionFn] = field(default_factory=dict, compare=False)

    @classmethod
    def build(cls, spec: RunSpec, mesh: Mesh, lengths: DocumentLengths = document_lengths) -> ContextParallel:
        """Build from a spec. MTP depths communicate as the last layer does."""
        chosen, depths = spec.parallel.cp_comm_type, spec.model.mtp.num_layers
        exchanges = (*chosen, *chosen[-1:] * depths) if isinstance(chosen, tuple) else (chosen,)
        return cls(mesh.cp, exchanges, mesh.cp_hierarchy, lengths, taken_backends(spec))

    def _ring(
        self, axis: Axis, length: int, documents_BS: Tensor | None, documents: Documents | None, window: int | None
    ) -> AttentionFn:
        """Return ring attention: the engine's own, or that of Transformer Engine."""
        backend = self.backends.of(window)
        if backend != "te":
            return _ring_attention(axis, _ring_parts(axis, length, documents_BS, documents, window, backend))
        if documents is not None or (window or length) < length:
            raise ValueError("attention_backend=te has no ring for sliding windows and packed documents")
        if axis not in self._library_rings:
            self._library_rings[axis] = te_ring_attention(axis)
        return self._library_rings[axis]

    def _over_all_keys(
        self, length: int, documents_BS: Tensor | None, documents: Documents | None, window: int | None
    ) -> AttentionFn:
        """Return attention of this rank's queries over all keys."""
        queries, keys = head_tail_runs(length, self.axis.size, self.axis.rank), (range(length),)
        backend = self.backends.of(window)
        if backend == "flex":
            return flex_attention_by_position(queries, keys, documents_BS, window)
        if backend in RUN_KERNELS:
            return package_attention(RUN_KERNELS[backend], queries, documents, window)
        return blockwise_attention(make_block_mask(queries, keys, window, documents), _block_backend(backend))

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the position ids of this rank's `num_tokens` tokens in their sample, [s]."""
        return cp_positions(num_tokens * self.axis.size, self.axis, device)

    def token_places(self, num_tokens: int, documents_Bs: Tensor | None, device: torch.device) -> TokenPlaces:
        """Return the position ids of this rank's tokens; each row is of one sample."""
        return TokenPlaces(self.position_ids(num_tokens, device))

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the attention function of each layer; layers of equal communication type and window share one.

        Args:
            num_tokens: s, the tokens of this rank in a row.
            documents_Bs: document ids of this rank's tokens, all-gathered over cp here; None: one document a sample.
            windows: the sliding window of each layer; None: all tokens.
            device: the device of queries and keys.
        """
        length = num_tokens * self.axis.size
        documents_BS = None if documents_Bs is None else _gather_tokens(documents_Bs, 1, self.axis)
        on_host = None if documents_Bs is None else host_document_ids(documents_Bs)
        planned = documents_BS if on_host is None else on_host
        documents = None if planned is None else documents_by_row(planned, self.lengths)
        exchanges = self.exchanges if len(self.exchanges) > 1 else self.exchanges * len(windows)
        kinds = list(zip(exchanges, windows, strict=True))
        made: dict[tuple[ContextCommType, int | None], AttentionFn] = {}
        for way, window in set(kinds):
            if way == "a2a":
                whole = whole_sample_attention(length, documents_BS, documents, window, self.backends.of(window))
                attend = _ulysses_attention(self.axis, whole)
            elif way == "a2a+p2p":
                assert self.levels is not None, "the checker asks for parallel.hierarchical_context_parallel_sizes"
                inner, outer = self.levels
                attend = _ulysses_attention(inner, self._ring(outer, length, documents_BS, documents, window))
            elif way == "allgather":
                attend = _all_gather_attention(self.axis, self._over_all_keys(length, documents_BS, documents, window))
            else:
                attend = self._ring(self.axis, length, documents_BS, documents, window)
            made[way, window] = attend
        return [made[kind] for kind in kinds]


def _block_backend(backend: TakenBackend) -> BlockBackend:
    """Return the kernel of blocks; attention.backend_context refuses a ring and an all-gather without one."""
    if backend in ("auto", "flash", "math"):
        return backend
    raise ValueError(f"attention_backend={backend} computes no blocks of a context-parallel mask")


def cp_positions(length: int, axis: Axis, device: torch.device | None = None) -> Tensor:
    """Return this rank's position ids in a sample of `length` tokens: chunk r, then chunk 2 cp - 1 - r."""
    return positions_of(head_tail_runs(length, axis.size, axis.rank), device)


def head_tail_runs(length: int, ranks: int, rank: int) -> Runs:
    """Return the tokens of a rank in a sample of `length` tokens: its chunk in the first half, and in the second."""
    if ranks == 1:
        return (range(length),)
    chunk = length // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return range(rank * chunk, (rank + 1) * chunk), range(late * chunk, (late + 1) * chunk)


def _join_ranks(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate the tokens of all ranks in the order of positions."""
    halves = [part.chunk(2, dim=dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=dim)


def _split_ranks(x: Tensor, dim: int, ranks: int) -> list[Tensor]:
    """Return the tokens of each rank: the inverse of `_join_ranks`."""
    chunks = x.chunk(2 * ranks, dim=dim)
    return [torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim=dim) for rank in range(ranks)]


def _gather_tokens(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """All-gather the ranks' tokens along `dim`, in the order of positions."""
    return _join_ranks(all_gather_async(x, 0, axis).wait().chunk(axis.size), dim)


def _all_gather_attention(axis: Axis, attend_all: AttentionFn) -> AttentionFn:
    """allgather: all-gather K and V, attend to all; reduce-scatter their gradients (Llama 3)."""

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        gathered = apply_function(_AllGather, torch.cat((k_BGsD, v_BGsD), dim=-1), axis)
        k_BGSD, v_BGSD = torch.split_with_sizes(gathered, (k_BGsD.shape[-1], v_BGsD.shape[-1]), dim=-1)
        return attend_all(q_BNsD, k_BGSD, v_BGSD, scoring)

    return attend


def _ring_parts(
    axis: Axis,
    length: int,
    documents_BS: Tensor | None,
    documents: Documents | None,
    window: int | None,
    backend: TakenBackend,
) -> tuple[PartialAttention, ...]:
    """Return attention of this rank's queries over the keys of each rank."""
    tokens = [head_tail_runs(length, axis.size, rank) for rank in range(axis.size)]
    queries = tokens[axis.rank]

    def part(keys: Runs) -> PartialAttention:
        mask = make_block_mask(queries, keys, window, documents)
        if backend != "flex":
            return BlockwisePart(mask, _block_backend(backend))
        # Without a visible pair there is no block, and nothing to call.
        return (
            FlexPart(FlexMask.by_position(queries, keys, documents_BS, window)) if mask.blocks else BlockwisePart(mask)
        )

    return tuple(map(part, tokens))


def _ring_attention(axis: Axis, parts: tuple[PartialAttention, ...]) -> AttentionFn:
    """p2p: ring attention, with one part of the keys per rank that owns some."""

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        return apply_function(RingAttention, q_BNsD, k_BGsD, v_BGsD, parts, axis, scoring, scoring.sinks)

    return attend


def _ulysses_attention(axis: Axis, local_attend: AttentionFn) -> AttentionFn:
    """a2a: all-to-all from token shards to head shards; attend with N / cp heads (DeepSpeed-Ulysses).

    Tokens arrive in the order of positions. a2a+p2p (LoongTrain): all-to-all over the inner axis, ring attention over
    the outer axis. The ranks of an outer group then hold the same heads, and of the tokens each an early and a late
    chunk, as in a ring of all ranks.
    """

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        heads = (q_BNsD, *(_repeat_kv_to(x, axis.size) for x in (k_BGsD, v_BGsD)))
        q_BnSD, k_BgSD, v_BgSD = (_to_heads(x, axis) for x in heads)
        return _to_tokens(local_attend(q_BnSD, k_BgSD, v_BgSD, scoring.shard_heads(axis.rank, axis.size)), axis)

    return attend


def _repeat_kv_to(x_BGsD: Tensor, ranks: int) -> Tensor:
    """Repeat key/value groups so that each rank gets at least one in an all-to-all over heads."""
    groups = x_BGsD.shape[1]
    return x_BGsD if groups % ranks == 0 else x_BGsD.repeat_interleave(ranks // groups, dim=1)


def _to_heads(x_BNsD: Tensor, axis: Axis) -> Tensor:
    """All-to-all from token shards to head shards: [B, N, s, D] -> [B, n, S, D], tokens in the order of positions."""
    parts = torch.stack(x_BNsD.chunk(axis.size, dim=1))  # [cp, B, n, s, D]: part i has the heads of rank i
    return _join_ranks(apply_function(_AllToAll, parts, axis).unbind(), _SEQUENCE)


def _to_tokens(x_BnSD: Tensor, axis: Axis) -> Tensor:
    """All-to-all from head shards to token shards: [B, n, S, D], in the order of positions -> [B, N, s, D]."""
    parts = torch.stack(_split_ranks(x_BnSD, _SEQUENCE, axis.size))  # [cp, B, n, s, D]: part i has tokens of rank i
    return torch.cat(apply_function(_AllToAll, parts, axis).unbind(), dim=1)


class _AllGather(torch.autograd.Function):
    """All-gather of K and V, [B, G, s, F] -> [B, G, S, F] in the order of positions; backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather_tokens(parts, _SEQUENCE, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = torch.cat(_split_ranks(gradients[0], _SEQUENCE, ctx.axis.size))
        return reduce_scatter_async(parts, 0, ctx.axis).wait(), None


class _AllToAll(torch.autograd.Function):
    """All-to-all along dim 0: part i goes to rank i, [cp, ...] -> [cp, ...] by sender. Backward is the same."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_to_all_async(parts, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all_async(gradients[0], ctx.axis).wait(), None
