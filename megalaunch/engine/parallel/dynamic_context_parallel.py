"""Context parallelism over documents partitioned by length (document_partition.py): keys go only where they are needed.

One uneven all-to-all a layer carries the keys and values of cut documents, beside the attention of whole ones.
Shapes as in model/context.py; c tokens of this rank in one row (c = B s), R tokens whose keys arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalaunch.engine.collectives import AsyncCollective, all_to_all_v_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.core import AttentionFn, causal_attention, masked_attention
from megalaunch.engine.model.attention.mask import make_mask
from megalaunch.engine.model.attention.score_mod import PLAIN, ScoreMod
from megalaunch.engine.parallel.document_partition import DocumentChunk, DocumentPartition, Flat, partition_documents

# Whole documents that share one masked product: below this many tokens starting one costs more than it computes.
_BUNDLE = 256

Products = Sequence[tuple[int, int, AttentionFn]]
"""Queries and keys of each product of a rank's attention, one after the other, and how it is computed."""


def document_lengths(documents_BS: Tensor) -> tuple[int, ...]:
    """How long the documents of each row are, row after row: runs of one number."""
    rows = documents_BS.cpu().numpy()
    ends = [np.flatnonzero(np.diff(row, append=row[-1] + 1)) + 1 for row in rows]
    return tuple(int(length) for row in ends for length in np.diff(row, prepend=0))


def local_token_ids(documents_BS: Tensor, axis: Axis) -> Tensor:
    """The tokens that this rank holds, [B, s], by their number in the microbatch."""
    own = partition_documents(document_lengths(documents_BS), axis.size).local_chunks(axis.rank)
    return torch.from_numpy(own).view(len(documents_BS), -1)


@dataclass(frozen=True)
class KVExchangePlan:
    """What one rank of a deal does in a layer: numbers of its tokens that are sent, how many to and from each rank.

    Its first `whole` tokens are whole documents; the others see the keys `keys`, by their number among its own tokens
    and those that arrive, after them.
    """

    sent: Flat
    to: tuple[int, ...]
    found: tuple[int, ...]
    whole: int
    keys: Flat


def make_exchange_plan(partition: DocumentPartition, rank: int) -> KVExchangePlan:
    """That of `rank`."""
    own, holders, chunks = partition.local_chunks(rank), partition.owner_of_token(), partition.ranks[rank]
    found = partition.remote_tokens(rank, holders)
    number = np.full(len(holders), -1)
    number[own] = np.arange(len(own))
    number[np.concatenate(found)] = len(own) + np.arange(sum(map(len, found)))
    sent = [number[partition.remote_tokens(other, holders)[rank]] for other in range(len(partition.ranks))]
    keys = [number[partition.first[p.document] + np.arange(p.stop)] for p in chunks if not partition.full_documents(p)]
    return KVExchangePlan(
        sent=np.concatenate(sent),
        to=tuple(map(len, sent)),
        found=tuple(map(len, found)),
        whole=sum(p.num_tokens for p in chunks if partition.full_documents(p)),
        keys=np.concatenate((*keys, np.empty(0, np.int64))),
    )


@dataclass(frozen=True)
class DynamicContextParallel:
    """The context of one rank; documents are given for all tokens of a sample, and say who holds which."""

    axis: Axis

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Not to be known from a number of tokens: raises ValueError."""
        raise ValueError("tokens that are dealt out by length come with their positions")

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """One function for each window; `documents_Bs` are those of whole samples, [B, S]."""
        if documents_Bs is None:
            raise ValueError("tokens that are dealt out by length come with their documents")
        partition = partition_documents(document_lengths(documents_Bs), self.axis.size)
        plan = make_exchange_plan(partition, self.axis.rank)
        made = {window: _attention(partition, plan, self.axis, window, device) for window in set(windows)}
        return [made[window] for window in windows]


def _attention(
    partition: DocumentPartition, plan: KVExchangePlan, axis: Axis, window: int | None, device: torch.device
) -> AttentionFn:
    chunks = partition.ranks[axis.rank]
    whole = _full_document_attention([p.num_tokens for p in chunks if partition.full_documents(p)], window, device)
    rest = [_split_document_attention(p, window, device) for p in chunks if not partition.full_documents(p)]
    sent, keys = (torch.from_numpy(numbers).to(device) for numbers in (plan.sent, plan.keys))

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: ScoreMod = PLAIN, /) -> Tensor:
        q_NcD, kv_GcD = _flatten_batch(q_BNsD), torch.stack((_flatten_batch(k_BGsD), _flatten_batch(v_BGsD)))
        parts = [plan.whole, q_NcD.shape[1] - plan.whole]
        q_whole, q_cut = torch.split(q_NcD, parts, dim=1)
        out = []
        if partition.split_documents:
            kv_exchange = _KVExchange(plan, axis, sent)
            coming: Tensor = _StartKVExchange.apply(kv_GcD, kv_exchange)  # type: ignore[no-untyped-call]
            out += _computed(q_whole, kv_GcD[:, :, : plan.whole], whole, scoring)
            arrived: Tensor = _FinishKVExchange.apply(coming, kv_exchange)  # type: ignore[no-untyped-call]
            at_hand = torch.cat((kv_GcD, arrived), dim=2)
            out += _computed(q_cut, at_hand.index_select(2, keys), rest, scoring)
            # Nothing, but a rank that sees no key of others takes part in the backward exchange all the same.
            out.append(arrived[1, :, :0].repeat_interleave(q_NcD.shape[0] // kv_GcD.shape[1], dim=0))
        else:
            out += _computed(q_whole, kv_GcD, whole, scoring)
        out_NcD = torch.cat(out, dim=1)
        return out_NcD.view(len(out_NcD), len(q_BNsD), -1, out_NcD.shape[2]).transpose(0, 1)

    return attend


def _computed(q_NcD: Tensor, kv_GtD: Tensor, products: Products, scoring: ScoreMod) -> list[Tensor]:
    """Each product's output [N, ., D]."""
    if not products:
        return []
    queries = torch.split(q_NcD, [count for count, _, _ in products], dim=1)
    keys_values = torch.split(kv_GtD, [count for _, count, _ in products], dim=2)
    return [
        attend(q[None], kv[0][None], kv[1][None], scoring)[0]
        for q, kv, (_, _, attend) in zip(queries, keys_values, products, strict=True)
    ]


def _full_document_attention(lengths: Sequence[int], window: int | None, device: torch.device) -> Products:
    """A product for each long document; short ones share products."""
    made: list[tuple[int, int, AttentionFn]] = []
    for bundle in _group_short_documents(lengths):
        tokens = sum(bundle)
        attend: AttentionFn = partial(causal_attention, window=window)
        if len(bundle) > 1:
            numbers = torch.arange(len(bundle), device=device)
            documents = numbers.repeat_interleave(torch.tensor(bundle, device=device))[None]
            positions = torch.arange(tokens, device=device)
            attend = masked_attention(make_mask(positions, positions, documents, documents, window))
        made.append((tokens, tokens, attend))
    return made


def _group_short_documents(lengths: Sequence[int]) -> list[list[int]]:
    """Neighbours of together at most _BUNDLE tokens."""
    bundles: list[list[int]] = []
    for length in lengths:
        if bundles and sum(bundles[-1]) + length <= _BUNDLE:
            bundles[-1].append(length)
        else:
            bundles.append([length])
    return bundles


def _split_document_attention(
    chunk: DocumentChunk, window: int | None, device: torch.device
) -> tuple[int, int, AttentionFn]:
    """The queries of a piece over all keys of its document up to its end."""
    if chunk.start == 0:
        return chunk.num_tokens, chunk.stop, partial(causal_attention, window=window)
    positions = torch.arange(chunk.stop, device=device)
    return (
        chunk.num_tokens,
        chunk.stop,
        masked_attention(make_mask(positions[chunk.start :], positions, None, None, window)),
    )


def _flatten_batch(x_BNsD: Tensor) -> Tensor:
    """[B, N, s, D] -> [N, c, D]."""
    return x_BNsD.transpose(0, 1).flatten(1, 2)


class _KVExchange:
    """One layer's keys and values on their way, and their gradients on the way back."""

    def __init__(self, plan: KVExchangePlan, axis: Axis, sent: Tensor) -> None:
        self.plan, self.axis, self.sent = plan, axis, sent
        self.pending: AsyncCollective | None = None

    def wait(self) -> Tensor:
        """What was on its way last."""
        assert self.pending is not None, "nothing was sent"
        arrived, self.pending = self.pending.wait(), None
        return arrived


class _StartKVExchange(torch.autograd.Function):
    """kv [2, G, c, D] -> [2, G, R, D], not read before `_FinishKVExchange`; backward: gradients of local keys."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, kv_exchange: _KVExchange) -> Tensor:
        ctx.offloaded, ctx.shape = kv_exchange, kv.shape
        plan = kv_exchange.plan
        packed = kv.index_select(2, kv_exchange.sent).permute(2, 0, 1, 3)
        kv_exchange.pending = all_to_all_v_async(packed, plan.to, plan.found, kv_exchange.axis)
        return kv.new_empty(*kv.shape[:2], sum(plan.found), kv.shape[3])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kv_exchange: _KVExchange = ctx.offloaded
        found, counts = kv_exchange.wait(), list(kv_exchange.plan.to)
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=found.device)
        # Rank by rank: none wants a token twice, so that sums are made in one order.
        for numbers, part in zip(torch.split(kv_exchange.sent, counts), torch.split(found, counts), strict=True):
            total.index_add_(2, numbers, part.permute(1, 2, 0, 3).float())
        return total.to(found.dtype), None


class _FinishKVExchange(torch.autograd.Function):
    """What left, [2, G, R, D]; backward: its gradients leave."""

    @staticmethod
    def forward(ctx: Any, coming: Tensor, kv_exchange: _KVExchange) -> Tensor:
        ctx.offloaded = kv_exchange
        return kv_exchange.wait().permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kv_exchange: _KVExchange = ctx.offloaded
        packed = gradients[0].permute(2, 0, 1, 3)
        kv_exchange.pending = all_to_all_v_async(packed, kv_exchange.plan.found, kv_exchange.plan.to, kv_exchange.axis)
        return gradients[0], None
