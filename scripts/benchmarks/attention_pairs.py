"""Query-key pairs that context parallelism multiplies, over those that the attention mask admits.

Run it as `scripts/bench attention_pairs [--tokens N] [--ranks R] [--tile N] [--document N] [--window N]`; exit 1 when a
ratio is above the bar. It counts the blocks that the ranks compute, in tiles of so many queries, of which fused kernels
skip those that no query sees. `busiest`: pairs of the busiest rank over the mean; `calls`: blocks of that of most.
"""

from __future__ import annotations

import argparse
import sys

from megalaunch.engine.model.attention.block_mask import BlockMask, make_block_mask
from megalaunch.engine.parallel.context_parallel import head_tail_runs

BAR = 1.1
EXCHANGES = ("p2p", "allgather")


def masks_of_ranks(exchange: str, tokens: int, ranks: int, window: int | None, document: int) -> list[list[BlockMask]]:
    """Return the masks that each rank computes in a layer."""
    shards = [head_tail_runs(tokens, ranks, rank) for rank in range(ranks)]
    whole = (range(tokens),)
    documents = (tuple(min(document, tokens - first) for first in range(0, tokens, document)),)
    pairs = {
        "p2p": [[(own, keys) for keys in shards] for own in shards],
        "allgather": [[(own, whole)] for own in shards],
    }
    return [[make_block_mask(*each, window, documents) for each in rank] for rank in pairs[exchange]]


def count(masks: list[list[BlockMask]], tile: int) -> list[int]:
    """Return the pairs that each rank multiplies."""
    return [sum(block.multiplied_pairs(tile) for mask in rank for block in mask.blocks) for rank in masks]


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
        found, needed = count(masks, options.tile), sum(count(masks, 1))
        ratio = sum(found) / needed
        worst = max(worst, ratio)
        calls = max(sum(len(mask.blocks) for mask in rank) for rank in masks)
        busiest = max(found) * ranks / sum(found)
        print(f"{exchange:<12}{sum(found):>14,}{needed:>14,}{ratio:>8.3f}{busiest:>9.3f}{calls:>7}")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
