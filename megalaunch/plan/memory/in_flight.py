"""Count the microbatches whose activations a pipeline rank holds at its peak, by chunk."""

from __future__ import annotations

from functools import lru_cache

from megalaunch.schema.parallel import Schedule


@lru_cache(maxsize=65536)
def in_flight(schedule: Schedule, pp: int, chunks: int, rank: int, microbatches: int, group: int) -> tuple[int, ...]:
    """Return the microbatches in flight in each chunk of a rank when it begins its first backward pass.

    1F1B: pp - rank (Narayanan et al. 2021a). Interleaved: Megatron's warm-up of 2 (pp - rank - 1) + (chunks - 1) group
    passes and one more (Narayanan et al. 2021b). GPipe: all. The V schedules (Qi et al. 2024): on every rank as many as
    on the first rank of 1F1B.
    """
    if schedule == "gpipe":
        return (microbatches,) * chunks
    if schedule in ("zbv", "dualpipev"):
        return _v_shaped(pp, rank, microbatches, 1 if schedule == "dualpipev" else 0)
    if chunks == 1:
        return (min(pp - rank, microbatches),)
    total = chunks * microbatches
    passes = min(total, 2 * (pp - rank - 1) + (chunks - 1) * group + 1)
    return _interleaved_warmup(passes, chunks, microbatches, group)


def _v_shaped(pp: int, rank: int, microbatches: int, extra: int) -> tuple[int, ...]:
    """Return the microbatches in flight of both chunks: 2 pp chunk passes in total.

    On a low rank the first chunk waits long for its backward, the second only briefly.
    """
    first = min(microbatches, 2 * pp - rank + extra)
    return first, min(microbatches, rank + 1)


def _interleaved_warmup(passes: int, chunks: int, microbatches: int, group: int) -> tuple[int, ...]:
    """Return the first forward passes by chunk: each group of microbatches passes all chunks before the next group."""
    counts = [0] * chunks
    start = 0
    while passes > 0 and start < microbatches:
        size = min(group, microbatches - start)
        for chunk in range(chunks):
            taken = min(size, passes)
            counts[chunk] += taken
            passes -= taken
        start += size
    return tuple(counts)
