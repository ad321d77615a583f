"""Partition packed documents over context-parallel ranks by their lengths; plain arithmetic, no communication.

Every rank gets the same number of tokens. A short document stays whole on one rank, a longer one is sharded over a
group of neighbouring ranks, the longest over all ranks. Each rank of a group holds an early and a late chunk
(head-tail balancing), so that a causal mask gives all of them the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import add, le

import numpy as np
from numpy.typing import NDArray

# Values of k. A document is sharded over the smallest group of ranks such that it is at most 1/k of the group's even
# share of tokens and of query-key pairs. All k are tried. 0: the group only needs room for the tokens; None: all ranks.
SPLIT_THRESHOLDS = (0, 1, 2, 4, 8, None)
# Receiving one key takes as long as computing this many query-key pairs, on GPUs with a network: see
# docs/dev/decisions.md. It only chooses between partitions that are all correct.
KV_TRANSFER_COST = 256

Flat = NDArray[np.int64]
"""Indices of tokens in a microbatch whose rows are concatenated."""


@dataclass(frozen=True)
class DocumentChunk:
    """Contiguous tokens of a document on one rank: positions `start` to `stop` - 1 in the document."""

    document: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start

    @property
    def attention_work(self) -> int:
        """Return the number of query-key pairs of the chunk's queries under a causal mask."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2


@dataclass(frozen=True)
class DocumentPartition:
    """Documents of these `lengths` over ranks: the chunks of each rank, whole documents first, longest first."""

    lengths: tuple[int, ...]
    ranks: tuple[tuple[DocumentChunk, ...], ...]

    @cached_property
    def first(self) -> Flat:
        """The index of the first token of each document."""
        return np.cumsum((0, *self.lengths[:-1]))

    def is_full_document(self, chunk: DocumentChunk) -> bool:
        """Return True if the chunk is a whole document."""
        return chunk.num_tokens == self.lengths[chunk.document]

    @cached_property
    def has_split_documents(self) -> bool:
        """True if any document is sharded over several ranks."""
        return not all(self.is_full_document(chunk) for chunks in self.ranks for chunk in chunks)

    def local_token_indices(self, rank: int) -> Flat:
        """Return the indices of a rank's tokens, in the order of its chunks."""
        return np.concatenate([self.first[p.document] + np.arange(p.start, p.stop) for p in self.ranks[rank]])

    def places_of_tokens(self) -> tuple[Flat, Flat]:
        """Return the document of each token, and its position there."""
        documents = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return documents, np.arange(len(documents)) - self.first[documents]

    def owner_of_token(self) -> Flat:
        """Return the rank that holds each token."""
        found = np.empty(sum(self.lengths), np.int64)
        for rank in range(len(self.ranks)):
            found[self.local_token_indices(rank)] = rank
        return found

    def remote_tokens(self, rank: int, holders: Flat) -> tuple[Flat, ...]:
        """Return, for each other rank, the indices of its tokens whose keys and values the queries of `rank` need.

        `holders` is the result of `owner_of_token`.
        """
        stops: dict[int, int] = {}
        for chunk in self.ranks[rank]:
            if not self.is_full_document(chunk):
                stops[chunk.document] = max(stops.get(chunk.document, 0), chunk.stop)
        seen = [self.first[document] + np.arange(stop) for document, stop in sorted(stops.items())]
        tokens = np.concatenate((*seen, np.empty(0, np.int64)))
        homes = holders[tokens]
        return tuple(tokens[homes == other] if other != rank else tokens[:0] for other in range(len(self.ranks)))

    def attention_work(self, rank: int) -> int:
        """Return the number of query-key pairs of a rank: its work in attention."""
        return sum(chunk.attention_work for chunk in self.ranks[rank])

    @cached_property
    def cost(self) -> tuple[int, int]:
        """Estimated time of the slowest rank, in query-key pairs, then the number of keys that all ranks receive.

        The time is the most attention work of a rank, plus the most keys received by a rank x KV_TRANSFER_COST.
        """
        ranks = range(len(self.ranks))
        holders = self.owner_of_token()
        arriving = (
            [sum(map(len, self.remote_tokens(rank, holders))) for rank in ranks] if self.has_split_documents else [0]
        )
        return max(map(self.attention_work, ranks)) + KV_TRANSFER_COST * max(arriving), sum(arriving)


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


@lru_cache(maxsize=256)
def partition_documents(
    lengths: tuple[int, ...], ranks: int, groups_by: tuple[int | None, ...] = SPLIT_THRESHOLDS
) -> DocumentPartition:
    """Return the partition of lowest cost among those of all `groups_by`; deterministic, so equal on every rank.

    Args:
        lengths: tokens of each document of a microbatch.
        ranks: cp, which divides their sum.
        groups_by: the values of k to try (`SPLIT_THRESHOLDS`).

    Raises:
        ValueError: the number of tokens is not a multiple of `ranks`.
    """
    tokens, rest = divmod(sum(lengths), ranks)
    if rest or not tokens:
        raise ValueError(f"{sum(lengths)} tokens do not divide over {ranks} context-parallel ranks")
    return min(
        (_GreedyPartitioner(lengths, ranks, parts).partition() for parts in groups_by), key=lambda found: found.cost
    )


class _GreedyPartitioner:
    """Greedy partition for one k: longest document first, each to the group whose busiest rank ends with least work."""

    def __init__(self, lengths: tuple[int, ...], ranks: int, parts: int | None) -> None:
        self._lengths, self._ranks, self._parts = lengths, ranks, parts
        self._tokens, self._pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        self._room, self._work = [self._tokens // ranks] * ranks, [0] * ranks
        self._given: list[list[DocumentChunk]] = [[] for _ in range(ranks)]

    def partition(self) -> DocumentPartition:
        """Assign all documents and return the partition."""
        for document in sorted(range(len(self._lengths)), key=lambda number: (-self._lengths[number], number)):
            if not self._assign_to_group(document):
                self._fill_remaining(document)
        return DocumentPartition(self._lengths, tuple(tuple(self._in_order(chunks)) for chunks in self._given))

    def _group_size(self, length: int) -> int:
        """Return over how many ranks a document is sharded: a divisor of cp, so that groups are neighbouring ranks."""
        if self._parts is None:
            return self._ranks
        pairs = length * (length + 1) // 2 * self._ranks * self._parts
        tokens = length * self._ranks * max(1, self._parts)
        for size in range(1, self._ranks):
            if self._ranks % size == 0 and tokens <= self._tokens * size and pairs <= self._pairs * size:
                return size
        return self._ranks

    def _assign_to_group(self, document: int) -> bool:
        """Assign a document to a group of ranks; return False if no group has room."""
        length = self._lengths[document]
        size = self._group_size(length)
        chunks = [_head_tail_chunks(document, length, size, place) for place in range(size)]
        tokens = [sum(chunk.num_tokens for chunk in pieces) for pieces in chunks]
        pairs = [sum(chunk.attention_work for chunk in pieces) for pieces in chunks]
        found: tuple[int, int] | None = None
        for first in range(0, self._ranks, size):
            room, work = self._room[first : first + size], self._work[first : first + size]
            if all(map(le, tokens, room)):
                most = max(map(add, work, pairs)), first
                found = min(found or most, most)
        if found is None:
            return False
        for place, pieces in enumerate(chunks):
            for chunk in pieces:
                self._assign(found[1] + place, chunk)
        return True

    def _fill_remaining(self, document: int) -> None:
        """Split a document into contiguous chunks that fill the remaining room, the rank with most room first."""
        start, stop = 0, self._lengths[document]
        while start < stop:
            rank = max(range(self._ranks), key=lambda number: (self._room[number], -self._work[number], -number))
            taken = min(self._room[rank], stop - start)
            self._assign(rank, DocumentChunk(document, start, start + taken))
            start += taken

    def _assign(self, rank: int, chunk: DocumentChunk) -> None:
        self._given[rank].append(chunk)
        self._room[rank] -= chunk.num_tokens
        self._work[rank] += chunk.attention_work

    def _in_order(self, chunks: Sequence[DocumentChunk]) -> list[DocumentChunk]:
        return sorted(
            chunks, key=lambda p: (p.num_tokens != self._lengths[p.document], -p.num_tokens, p.document, p.start)
        )


def _head_tail_chunks(document: int, length: int, ranks: int, rank: int) -> list[DocumentChunk]:
    """Return the non-empty ones of the chunks `rank` and 2 ranks - 1 - `rank` of 2 ranks; adjacent ones are merged."""
    bounds = [length * number // (2 * ranks) for number in range(2 * ranks + 1)]
    late = 2 * ranks - 1 - rank
    if late == rank + 1:
        return [DocumentChunk(document, bounds[rank], bounds[late + 1])] if length else []
    chunks = (
        DocumentChunk(document, bounds[rank], bounds[rank + 1]),
        DocumentChunk(document, bounds[late], bounds[late + 1]),
    )
    return [chunk for chunk in chunks if chunk.num_tokens]
