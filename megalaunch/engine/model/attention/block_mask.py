"""Attention masks as blocks: rectangles of queries and keys that are multiplied in full or under a diagonal.

A causal mask over contiguous tokens, with a sliding window or documents, is a union of disjoint blocks of three shapes,
which fused kernels compute without a mask. What no query attends to is in no block, so that it is never multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from megalaunch.engine.model.attention.mask import AttentionMask

Shape = Literal["full", "causal", "anti_causal"]
"""Query i of a block attends to key j of it: always, if j <= i, or if j >= i. The last two are square."""

Runs = tuple[range, ...]
"""Tokens in memory order, as runs of contiguous position ids, in increasing order."""


@dataclass(frozen=True)
class Block:
    """Queries and keys that are multiplied, as indices of tokens in memory.

    Attributes:
        queries: The queries.
        keys: The keys.
        shape: Which of the pairs are visible.
        row: The row of the batch; None: all rows.
    """

    queries: range
    keys: range
    shape: Shape = "full"
    row: int | None = None

    def of_queries(self, x_BNSD: Tensor) -> Tensor:
        """Return a view of the block's queries."""
        return self._view(x_BNSD, self.queries)

    def of_keys(self, x_BGTD: Tensor) -> Tensor:
        """Return a view of the block's keys."""
        return self._view(x_BGTD, self.keys)

    def _view(self, x: Tensor, tokens: range) -> Tensor:
        rows = x if self.row is None else x[self.row : self.row + 1]
        return rows[:, :, tokens.start : tokens.stop]

    def rectangles(self, size: int) -> Iterator[Block]:
        """Yield blocks of at most `size` queries, each with the keys that any of its queries sees."""
        for first in range(0, len(self.queries), size):
            queries = self.queries[first : first + size]
            keys = self.keys
            if self.shape == "causal":
                keys = keys[: first + len(queries)]
            elif self.shape == "anti_causal":
                keys = keys[first:]
            yield Block(queries, keys, row=self.row)

    def multiplied_pairs(self, tile: int = 1) -> int:
        """Return the pairs of a head that are multiplied tile by tile of so many queries; 1: the visible pairs."""
        return sum(len(part.queries) * len(part.keys) for part in self.rectangles(tile))


@dataclass(frozen=True)
class BlockMask:
    """The attention mask of some queries over some keys, as blocks."""

    queries: Runs
    keys: Runs
    window: int | None
    blocks: tuple[Block, ...]

    def rectangles(self, size: int) -> Iterator[Block]:
        """Yield rectangles of at most `size` queries that hold all visible pairs, and others for `attention_mask`."""
        return (part for block in self.blocks for part in block.rectangles(size))

    def attention_mask(self, block: Block, device: torch.device) -> AttentionMask:
        """Return the mask of a rectangle by position ids, for attention that has no fused kernel."""
        queries, keys = (
            positions_of(runs, device)[part.start : part.stop]
            for runs, part in ((self.queries, block.queries), (self.keys, block.keys))
        )
        return AttentionMask(queries, keys, window=self.window)


def positions_of(runs: Runs, device: torch.device | None) -> Tensor:
    """Return the position ids of tokens, [s] int64."""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


@lru_cache(maxsize=256)
def make_block_mask(
    queries: Runs,
    keys: Runs,
    window: int | None = None,
    documents: tuple[tuple[int, ...], ...] | None = None,
) -> BlockMask:
    """Return the causal mask as blocks.

    Args:
        queries: The queries' position ids.
        keys: The keys' position ids.
        window: The sliding window in tokens; None: full attention.
        documents: The lengths of the documents of each row, in the order of positions; None: one document.
    """
    if documents is None:
        return BlockMask(queries, keys, window, tuple(_merge(_segment_blocks(queries, keys, None, window))))
    rows: Sequence[int | None] = range(len(documents)) if len(set(documents)) > 1 else (None,)
    blocks = [
        replace(block, row=row)
        for row, lengths in zip(rows, documents, strict=False)
        for block in _merge(_segment_blocks(queries, keys, lengths, window))
    ]
    return BlockMask(queries, keys, window, tuple(blocks))


@dataclass(frozen=True)
class _Segment:
    """Contiguous tokens of one document: their position ids, and the index of the first one in memory."""

    positions: range
    index: int
    document: int

    def tokens(self, first: int, stop: int) -> range:
        """Return the tokens in memory of the positions `first` to `stop` - 1."""
        offset = self.index - self.positions.start
        return range(first + offset, stop + offset)


def _segments(runs: Runs, lengths: tuple[int, ...] | None) -> Iterator[_Segment]:
    """Yield the segments of tokens, cut at the ends of documents of these lengths."""
    ends = None if lengths is None else tuple(accumulate(lengths))
    index = 0
    for run in runs:
        if ends is None:
            yield _Segment(run, index, 0)
        else:
            for document, end in enumerate(ends):
                first, stop = max(run.start, end - lengths[document] if lengths else 0), min(run.stop, end)
                if first < stop:
                    yield _Segment(range(first, stop), index + first - run.start, document)
        index += len(run)


def _segment_blocks(queries: Runs, keys: Runs, lengths: tuple[int, ...] | None, window: int | None) -> Iterator[Block]:
    """Yield the blocks of all segments of queries and keys that share a document."""
    keys_of: dict[int, list[_Segment]] = {}
    for segment in _segments(keys, lengths):
        keys_of.setdefault(segment.document, []).append(segment)
    queries_of: dict[int, list[_Segment]] = {}
    for segment in _segments(queries, lengths):
        queries_of.setdefault(segment.document, []).append(segment)
    for document, own in queries_of.items():
        seen = keys_of.get(document, [])
        if window is None and own == seen and _is_contiguous(own):
            # Positions increase in memory: the causal mask of memory is that of positions.
            tokens = range(own[0].index, own[-1].tokens(own[-1].positions.start, own[-1].positions.stop).stop)
            yield Block(tokens, tokens, "causal")
            continue
        for q in own:
            for k in seen:
                yield from _causal_blocks(q, k) if window is None else _window_blocks(q, k, window)


def _is_contiguous(segments: Sequence[_Segment]) -> bool:
    return all(b.index == a.index + len(a.positions) for a, b in pairwise(segments))


def _causal_blocks(q: _Segment, k: _Segment) -> Iterator[Block]:
    """Yield the causal blocks of two segments: keys before all queries, the diagonal, queries after all keys."""
    first, stop, start, end = q.positions.start, q.positions.stop, k.positions.start, k.positions.stop
    before = min(end, first)
    if start < before:
        yield Block(q.tokens(first, stop), k.tokens(start, before))
    low, high = max(first, start), min(stop, end)
    if low < high:
        yield Block(q.tokens(low, high), k.tokens(low, high), "causal")
        if high < stop:
            yield Block(q.tokens(high, stop), k.tokens(low, high))


def _window_blocks(q: _Segment, k: _Segment, window: int) -> Iterator[Block]:
    """Yield the blocks of two segments in a sliding window, tile by tile of `window` queries.

    Of the keys of a tile the first ones leave the window one by one: they are anti-causal. Then come those that all of
    its queries see, and the tile's own, which are causal.
    """
    start, end = k.positions.start, k.positions.stop
    for first in range(q.positions.start, q.positions.stop, window):
        stop = min(first + window, q.positions.stop)
        oldest, common = first - window + 1, stop - window
        low, high = max(start, oldest), min(end, common)  # of the keys that leave the window
        if low < high:
            if low > oldest:  # these queries see all of them
                yield Block(q.tokens(first, first + low - oldest), k.tokens(low, high))
            offset = first - oldest
            yield Block(q.tokens(low + offset, high + offset), k.tokens(low, high), "anti_causal")
        yield from _causal_blocks(
            replace(q, positions=range(first, stop), index=q.index + first - q.positions.start),
            replace(k, positions=range(max(start, common), end), index=k.index + max(start, common) - start),
        )


def _merge(blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the blocks; neighbours in full with the same keys, or else with the same queries, become one."""
    merged: list[Block] = []
    for block in blocks:
        last = merged[-1] if merged else None
        if last is None or (last.shape, block.shape) != ("full", "full"):
            merged.append(block)
        elif last.keys == block.keys and last.queries.stop == block.queries.start:
            merged[-1] = replace(last, queries=range(last.queries.start, block.queries.stop))
        elif last.queries == block.queries and last.keys.stop == block.keys.start:
            merged[-1] = replace(last, keys=range(last.keys.start, block.keys.stop))
        else:
            merged.append(block)
    yield from merged
