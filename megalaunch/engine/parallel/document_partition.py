"""Which context-parallel rank gets which tokens of packed documents, by their lengths: plain arithmetic.

Every rank gets equally many tokens. A short document stays whole, a longer one is cut over a few neighbours, the
longest over all; each of them holds an early and a late chunk, so that a causal mask gives all the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import add, le

import numpy as np
from numpy.typing import NDArray

# A group is large enough for a document that is at most 1/k of the group's even share of tokens and of pairs; all k are
# tried. 0: when its tokens have room; None: when it is all ranks.
SPLIT_THRESHOLDS = (0, 1, 2, 4, 8, None)
# A key that arrives costs as much time as so many pairs of query and key, on GPUs with a network (docs/decisions.md).
# It only decides between deals that are all right.
KV_TRANSFER_COST = 256

Flat = NDArray[np.int64]
"""Tokens of a microbatch by their number, its rows one after the other."""


@dataclass(frozen=True)
class DocumentChunk:
    """Neighbouring tokens of a document on one rank: its places `start` to `stop` - 1."""

    document: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def attention_work(self) -> int:
        """Keys that its queries see, in all."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2


@dataclass(frozen=True)
class DocumentPartition:
    """Documents of these `lengths`, dealt out: the pieces of each rank, whole documents first, the longest leading."""

    lengths: tuple[int, ...]
    ranks: tuple[tuple[DocumentChunk, ...], ...]

    @cached_property
    def first(self) -> Flat:
        """The first token of each document."""
        return np.cumsum((0, *self.lengths[:-1]))

    def full_documents(self, chunk: DocumentChunk) -> bool:
        """True for all of a document."""
        return chunk.num_tokens == self.lengths[chunk.document]

    @cached_property
    def split_documents(self) -> bool:
        """Whether any document lies on several ranks."""
        return not all(self.full_documents(chunk) for chunks in self.ranks for chunk in chunks)

    def local_chunks(self, rank: int) -> Flat:
        """The tokens of a rank, in its order."""
        return np.concatenate([self.first[p.document] + np.arange(p.start, p.stop) for p in self.ranks[rank]])

    def owner_of_token(self) -> Flat:
        """The rank of each token."""
        found = np.empty(sum(self.lengths), np.int64)
        for rank in range(len(self.ranks)):
            found[self.local_chunks(rank)] = rank
        return found

    def remote_tokens(self, rank: int, holders: Flat) -> tuple[Flat, ...]:
        """The tokens of each other rank whose keys this one's queries see."""
        stops: dict[int, int] = {}
        for chunk in self.ranks[rank]:
            if not self.full_documents(chunk):
                stops[chunk.document] = max(stops.get(chunk.document, 0), chunk.stop)
        seen = [self.first[document] + np.arange(stop) for document, stop in sorted(stops.items())]
        tokens = np.concatenate((*seen, np.empty(0, np.int64)))
        homes = holders[tokens]
        return tuple(tokens[homes == other] if other != rank else tokens[:0] for other in range(len(self.ranks)))

    def attention_work(self, rank: int) -> int:
        """Keys that a rank's queries see, in all: its work in attention."""
        return sum(chunk.attention_work for chunk in self.ranks[rank])

    @cached_property
    def cost(self) -> tuple[int, int]:
        """What the slowest rank waits for, in pairs; then all keys that travel."""
        ranks = range(len(self.ranks))
        holders = self.owner_of_token()
        arriving = [sum(map(len, self.remote_tokens(rank, holders))) for rank in ranks] if self.split_documents else [0]
        return max(map(self.attention_work, ranks)) + KV_TRANSFER_COST * max(arriving), sum(arriving)


@lru_cache(maxsize=256)
def partition_documents(
    lengths: tuple[int, ...], ranks: int, groups_by: tuple[int | None, ...] = SPLIT_THRESHOLDS
) -> DocumentPartition:
    """The cheapest of some deals of documents to `ranks` ranks; the same on every rank that asks.

    Raises ValueError when the tokens are no multiple of the ranks.
    """
    tokens, rest = divmod(sum(lengths), ranks)
    if rest or not tokens:
        raise ValueError(f"{sum(lengths)} tokens do not divide over {ranks} context-parallel ranks")
    return min(
        (_GreedyPartitioner(lengths, ranks, parts).partition() for parts in groups_by), key=lambda found: found.cost
    )


class _GreedyPartitioner:
    """One way to deal: the longest documents first, each to the group of ranks that is left with the least work."""

    def __init__(self, lengths: tuple[int, ...], ranks: int, parts: int | None) -> None:
        self._lengths, self._ranks, self._parts = lengths, ranks, parts
        self._tokens, self._pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        self._room, self._work = [self._tokens // ranks] * ranks, [0] * ranks
        self._given: list[list[DocumentChunk]] = [[] for _ in range(ranks)]

    def partition(self) -> DocumentPartition:
        """All documents."""
        for document in sorted(range(len(self._lengths)), key=lambda number: (-self._lengths[number], number)):
            if not self._assign_to_group(document):
                self._fill_remaining(document)
        return DocumentPartition(self._lengths, tuple(tuple(self._in_order(chunks)) for chunks in self._given))

    def _group_size(self, length: int) -> int:
        """Ranks over which a document of this length is cut: a divisor of all, so that groups are neighbours."""
        if self._parts is None:
            return self._ranks
        pairs = length * (length + 1) // 2 * self._ranks * self._parts
        tokens = length * self._ranks * max(1, self._parts)
        for size in range(1, self._ranks):
            if self._ranks % size == 0 and tokens <= self._tokens * size and pairs <= self._pairs * size:
                return size
        return self._ranks

    def _assign_to_group(self, document: int) -> bool:
        """Give a document to one group, if any has room."""
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
        """Cut a document into what fills the room that is left, on as few ranks as can be."""
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
    """The chunks `rank` and 2 ranks - 1 - `rank` of 2 ranks, those that are not empty; neighbours as one."""
    bounds = [length * number // (2 * ranks) for number in range(2 * ranks + 1)]
    late = 2 * ranks - 1 - rank
    if late == rank + 1:
        return [DocumentChunk(document, bounds[rank], bounds[late + 1])] if length else []
    chunks = (
        DocumentChunk(document, bounds[rank], bounds[rank + 1]),
        DocumentChunk(document, bounds[late], bounds[late + 1]),
    )
    return [chunk for chunk in chunks if chunk.num_tokens]
