"""Dynamic context parallelism: documents are partitioned over cp by length (document_partition.py).

Whole documents need no communication. Keys and values of split documents are sent only to the ranks that need them, by
one uneven all-to-all a layer in forward and one in backward. Let kv_r be the keys and values of this rank's tokens, and
kv_w the part of kv_r that belongs to whole documents; q_w and q_s are the queries of whole and of split documents.

Forward:   start kv_in = all_to_all(kv_r[sent]);  out_w = attention(q_w, kv_w), which overlaps with it;
           wait;  out_s = attention(q_s, [kv_r, kv_in][keys])
Backward:  gradients of out_s;  start d_back = all_to_all(dkv_in), which overlaps with the gradients of out_w;
           wait;  dkv_r += d_back, added at the indices `sent`

Shapes as in model/attention/core.py; c = B s: this rank's tokens with its rows concatenated, R: tokens received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import AsyncCollective, all_to_all_v_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.block_attention import blockwise_attention
from megalaunch.engine.model.attention.block_mask import make_block_mask
from megalaunch.engine.model.attention.core import causal_attention, masked_attention
from megalaunch.engine.model.attention.documents import DocumentLengths, document_lengths
from megalaunch.engine.model.attention.mask import make_mask
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod
from megalaunch.engine.parallel.document_partition import DocumentChunk, DocumentPartition, Flat, partition_documents
from megalaunch.engine.platform.host_copy import copy_to_device

# Whole documents of together at most this many tokens share one masked attention call: launching a call for fewer
# tokens takes longer than its computation.
_BUNDLE = 256

AttentionCalls = Sequence[tuple[int, int, AttentionFn]]
"""The attention calls of a rank, in order: number of queries, number of keys, and the function."""


def local_token_indices(documents_BS: Tensor, axis: Axis, lengths: DocumentLengths = document_lengths) -> Tensor:
    """Return the indices of this rank's tokens in the microbatch whose rows are concatenated, [B, s]."""
    own = partition_documents(lengths(documents_BS), axis.size).local_token_indices(axis.rank)
    return torch.from_numpy(own).view(len(documents_BS), -1)


@dataclass(frozen=True)
class KVExchangePlan:
    """The all-to-all of keys and values of one rank in a layer.

    Attributes:
        send_indices: Indices of the local tokens to send, grouped by receiver.
        input_splits: Number of tokens sent to each rank.
        output_splits: Number of tokens received from each rank.
        full_document_tokens: The first so many local tokens are full documents.
        key_indices: The keys of the other local tokens, as indices into local tokens followed by received ones.
    """

    send_indices: Flat
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    full_document_tokens: int
    key_indices: Flat


def make_exchange_plan(partition: DocumentPartition, rank: int) -> KVExchangePlan:
    """Return the exchange plan of `rank`."""
    own, holders, chunks = partition.local_token_indices(rank), partition.owner_of_token(), partition.ranks[rank]
    received = partition.remote_tokens(rank, holders)
    number = np.full(len(holders), -1)
    number[own] = np.arange(len(own))
    number[np.concatenate(received)] = len(own) + np.arange(sum(map(len, received)))
    sent = [number[partition.remote_tokens(other, holders)[rank]] for other in range(len(partition.ranks))]
    keys = [
        number[partition.first[p.document] + np.arange(p.stop)] for p in chunks if not partition.is_full_document(p)
    ]
    return KVExchangePlan(
        send_indices=np.concatenate(sent),
        input_splits=tuple(map(len, sent)),
        output_splits=tuple(map(len, received)),
        full_document_tokens=sum(p.num_tokens for p in chunks if partition.is_full_document(p)),
        key_indices=np.concatenate((*keys, np.empty(0, np.int64))),
    )


@dataclass(frozen=True)
class DynamicContextParallel:
    """Dynamic context parallelism of one rank (`ContextParallelism`).

    Every rank gets the document ids of whole samples and computes the same partition from them. `lengths` reads them;
    fake tensors need another function.
    """

    axis: Axis
    lengths: DocumentLengths = document_lengths

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Raise ValueError: the position ids depend on the documents and come with the batch."""
        raise ValueError("dynamic context parallelism needs position ids in the batch")

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the attention function of each layer; layers of equal window share one.

        Unlike in the other forms of context parallelism, `documents_Bs` are the ids of whole samples, [B, S].
        """
        if documents_Bs is None:
            raise ValueError("dynamic context parallelism needs document ids in the batch")
        partition = partition_documents(self.lengths(documents_Bs), self.axis.size)
        plan = make_exchange_plan(partition, self.axis.rank)
        made = {window: _attention(partition, plan, self.axis, window, device) for window in set(windows)}
        return [made[window] for window in windows]


def _attention(
    partition: DocumentPartition, plan: KVExchangePlan, axis: Axis, window: int | None, device: torch.device
) -> AttentionFn:
    chunks = partition.ranks[axis.rank]
    full = _full_document_attention([p.num_tokens for p in chunks if partition.is_full_document(p)], window, device)
    split = [_split_document_attention(p, window) for p in chunks if not partition.is_full_document(p)]
    send_indices, key_indices = (
        copy_to_device(torch.from_numpy(numbers), device) for numbers in (plan.send_indices, plan.key_indices)
    )

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        q_NcD, kv_GcD = _flatten_batch(q_BNsD), torch.stack((_flatten_batch(k_BGsD), _flatten_batch(v_BGsD)))
        parts = [plan.full_document_tokens, q_NcD.shape[1] - plan.full_document_tokens]
        q_full, q_split = torch.split(q_NcD, parts, dim=1)
        out = []
        if partition.has_split_documents:
            kv_exchange = _KVExchange(plan, axis, send_indices)
            placeholder = apply_function(_StartKVExchange, kv_GcD, kv_exchange)
            # Between start and finish, so that the all-to-all overlaps with it; autograd runs the reverse order.
            out += _attend_documents(q_full, kv_GcD[:, :, : plan.full_document_tokens], full, scoring)
            received = apply_function(_FinishKVExchange, placeholder, kv_exchange)
            all_kv = torch.cat((kv_GcD, received), dim=2)
            out += _attend_documents(q_split, all_kv.index_select(2, key_indices), split, scoring)
            # An empty slice: it keeps `received` in the graph of a rank that received no keys, which must still enter
            # the all-to-all of the backward pass.
            out.append(received[1, :, :0].repeat_interleave(q_NcD.shape[0] // kv_GcD.shape[1], dim=0))
        else:
            out += _attend_documents(q_full, kv_GcD, full, scoring)
        out_NcD = torch.cat(out, dim=1)
        return out_NcD.view(len(out_NcD), len(q_BNsD), -1, out_NcD.shape[2]).transpose(0, 1)

    return attend


def _attend_documents(q_NcD: Tensor, kv_GtD: Tensor, calls: AttentionCalls, scoring: ScoreMod) -> list[Tensor]:
    """Run the attention calls; return the output of each, [N, ., D]."""
    if not calls:
        return []
    queries = torch.split(q_NcD, [count for count, _, _ in calls], dim=1)
    keys_values = torch.split(kv_GtD, [count for _, count, _ in calls], dim=2)
    return [
        attend(q[None], kv[0][None], kv[1][None], scoring)[0]
        for q, kv, (_, _, attend) in zip(queries, keys_values, calls, strict=True)
    ]


def _full_document_attention(lengths: Sequence[int], window: int | None, device: torch.device) -> AttentionCalls:
    """Return one attention call for each long document; short ones share masked calls."""
    made: list[tuple[int, int, AttentionFn]] = []
    for bundle in _group_short_documents(lengths):
        tokens = sum(bundle)
        attend: AttentionFn = partial(causal_attention, window=window)
        if len(bundle) > 1:
            numbers = np.repeat(np.arange(len(bundle)), bundle)
            documents = copy_to_device(torch.from_numpy(numbers), device)[None]
            positions = torch.arange(tokens, device=device)
            attend = masked_attention(make_mask(positions, positions, documents, documents, window))
        made.append((tokens, tokens, attend))
    return made


def _group_short_documents(lengths: Sequence[int]) -> list[list[int]]:
    """Group neighbouring documents of together at most _BUNDLE tokens."""
    bundles: list[list[int]] = []
    for length in lengths:
        if bundles and sum(bundles[-1]) + length <= _BUNDLE:
            bundles[-1].append(length)
        else:
            bundles.append([length])
    return bundles


def _split_document_attention(chunk: DocumentChunk, window: int | None) -> tuple[int, int, AttentionFn]:
    """Return the attention call of a chunk's queries over the keys of its document up to the chunk's end."""
    if chunk.start == 0:
        return chunk.num_tokens, chunk.stop, partial(causal_attention, window=window)
    mask = make_block_mask((range(chunk.start, chunk.stop),), (range(chunk.stop),), window)
    return chunk.num_tokens, chunk.stop, blockwise_attention(mask)


def _flatten_batch(x_BNsD: Tensor) -> Tensor:
    """[B, N, s, D] -> [N, c, D]."""
    return x_BNsD.transpose(0, 1).flatten(1, 2)


class _KVExchange:
    """The all-to-all in flight of one layer: of keys and values in forward, of their gradients in backward."""

    def __init__(self, plan: KVExchangePlan, axis: Axis, send_indices: Tensor) -> None:
        self.plan, self.axis, self.send_indices = plan, axis, send_indices
        self.pending: AsyncCollective | None = None

    def wait(self) -> Tensor:
        """Wait for the all-to-all that was started last and return its result."""
        assert self.pending is not None, "nothing was sent"
        received, self.pending = self.pending.wait(), None
        return received


class _StartKVExchange(torch.autograd.Function):
    """Start the all-to-all of kv [2, G, c, D]; backward: wait for the gradients and add them at the local tokens.

    The result [2, G, R, D] is a placeholder whose values are never read: it links this node of the autograd graph to
    `_FinishKVExchange`.
    """

    @staticmethod
    def forward(ctx: Any, kv: Tensor, kv_exchange: _KVExchange) -> Tensor:
        ctx.kv_exchange, ctx.shape = kv_exchange, kv.shape
        plan = kv_exchange.plan
        packed = kv.index_select(2, kv_exchange.send_indices).permute(2, 0, 1, 3)
        kv_exchange.pending = all_to_all_v_async(packed, plan.input_splits, plan.output_splits, kv_exchange.axis)
        return kv.new_empty(*kv.shape[:2], sum(plan.output_splits), kv.shape[3])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kv_exchange: _KVExchange = ctx.kv_exchange
        found, splits = kv_exchange.wait(), list(kv_exchange.plan.input_splits)
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=found.device)
        # One index_add per rank: a rank receives a token at most once, so the order of the sums is deterministic.
        by_rank = zip(torch.split(kv_exchange.send_indices, splits), torch.split(found, splits), strict=True)
        for indices, part in by_rank:
            total.index_add_(2, indices, part.permute(1, 2, 0, 3).float())
        return total.to(found.dtype), None


class _FinishKVExchange(torch.autograd.Function):
    """Wait for the keys and values, [2, G, R, D]; backward: start the all-to-all of their gradients.

    The gradient that backward returns is a placeholder: `_StartKVExchange` reads the received gradients instead.
    """

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, kv_exchange: _KVExchange) -> Tensor:
        ctx.kv_exchange = kv_exchange
        return kv_exchange.wait().permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kv_exchange: _KVExchange = ctx.kv_exchange
        packed = gradients[0].permute(2, 0, 1, 3)
        kv_exchange.pending = all_to_all_v_async(
            packed, kv_exchange.plan.output_splits, kv_exchange.plan.input_splits, kv_exchange.axis
        )
        return gradients[0], None
