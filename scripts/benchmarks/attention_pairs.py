"""Query-key pairs that context parallelism multiplies, over those that the attention mask admits.

Run it as `scripts/bench attention_pairs [--tokens N] [--ranks R] [--tile N] [--document N] [--window N]`; exit 1 when a
ratio is above the bar. It counts the blocks that the ranks compute, in tiles of so many queries, of which fused kernels
skip those that no query sees. Pairs are those of all heads, divided by their number: with a2a a rank has a part of the
heads. Short documents and samples, which a2a and dynamic cp compute under a dense mask, are counted as blocks, too.
`busiest`: pairs of the busiest rank over the mean; `calls`: blocks of that of most.
"""

from __future__ import annotations

import argparse
import sys
from math import gcd

from megalaunch.engine.model.attention.block_mask import BlockMask, Runs, make_block_mask
from megalaunch.engine.parallel.context_parallel import head_tail_runs
from megalaunch.engine.parallel.document_partition import partition_documents

BAR = 1.1
INNER = 2  # ranks of the inner axis of a2a+p2p, if the number of ranks is even
EXCHANGES = ("p2p", "allgather", "a2a", "a2a+p2p", "dynamic cp")


def masks_of_ranks(exchange: str, tokens: int, ranks: int, window: int | None, document: int) -> list[list[BlockMask]]:
    """Return the masks that each rank computes in a layer, for its heads."""
    documents = (tuple(min(document, tokens - first) for first in range(0, tokens, document)),)
    if exchange == "dynamic cp":
        return [[make_block_mask(*each, window) for each in rank] for rank in _dealt(documents[0], ranks)]
    pairs = _shared(exchange, tokens, ranks)
    return [[make_block_mask(*each, window, documents) for each in rank] for rank in pairs]


def ranks_with_other_heads(exchange: str, ranks: int) -> int:
    """Return over how many ranks the heads are distributed."""
    return {"a2a": ranks, "a2a+p2p": gcd(ranks, INNER)}.get(exchange, 1)


def _shared(exchange: str, tokens: int, ranks: int) -> list[list[tuple[Runs, Runs]]]:
    """Return the queries and keys of each rank where all ranks share every sample."""
    whole = (range(tokens),)
    if exchange == "a2a":
        return [[(whole, whole)]] * ranks
    outer = ranks // ranks_with_other_heads(exchange, ranks)
    shards = [head_tail_runs(tokens, outer, rank) for rank in range(outer)]
    if exchange == "allgather":
        return [[(own, whole)] for own in shards]
    return [[(own, keys) for keys in shards] for own in shards for _ in range(ranks // outer)]


def _dealt(documents: tuple[int, ...], ranks: int) -> list[list[tuple[Runs, Runs]]]:
    """Return the queries and keys of each rank where documents are distributed by length."""
    return [
        [((range(chunk.start, chunk.stop),), (range(chunk.stop),)) for chunk in chunks]
        for chunks in partition_documents(documents, ranks).ranks
    ]


def count(masks: list[list[BlockMask]], tile: int, other_heads: int) -> list[int]:
    """Return the pairs that each rank multiplies, of all heads over their number; masks are of 1 / `other_heads`."""
    multiplied = [sum(block.multiplied_pairs(tile) for mask in rank for block in mask.blocks) for rank in masks]
    return [pairs // other_heads for pairs in multiplied]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--document", type=int, default=None, help="tokens of a packed document")
    parser.add_argument("--window", type=int, default=None, help="sliding window in tokens")
    options = parser.parse_args()
    tokens, ranks = options.tokens, options.ranks
    print(f"{'exchange':<12}{'multiplied':>14}{'needed':>14}{'ratio':>8}{'busiest':>9}{'calls':>7}")
    worst = 0.0
    for exchange in EXCHANGES:
        masks = masks_of_ranks(exchange, tokens, ranks, options.window, options.document or tokens)
        other_heads = ranks_with_other_heads(exchange, ranks)
        found, needed = count(masks, options.tile, other_heads), sum(count(masks, 1, other_heads))
        ratio = sum(found) / needed
        worst = max(worst, ratio)
        calls = max(sum(len(mask.blocks) for mask in rank) for rank in masks)
        busiest = max(found) * ranks / sum(found)
        print(f"{exchange:<12}{sum(found):>14,}{needed:>14,}{ratio:>8.3f}{busiest:>9.3f}{calls:>7}")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
