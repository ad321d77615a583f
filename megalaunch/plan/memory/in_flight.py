"""Count the microbatches whose activations a pipeline rank holds at its peak, by chunk."""

from __future__ import annotations

from functools import lru_cache

from megalaunch.schema.parallel import Schedule


@lru_cache(maxsize=65536)
def in_flight(schedule: Schedule, pp: int, chunks: int, rank: int, microbatches: int, group: int) -> tuple[int, ...]:
    """Return the microbatches in flight in each chunk of a rank: those whose last backward pass has not ended.

    1F1B: pp - rank (Narayanan et al. 2021a). Interleaved: Megatron's warm-up of 2 (pp - rank - 1) + (chunks - 1) group
    passes and one more (Narayanan et al. 2021b). GPipe: all. Of schedules that split the backward pass, in torch's
    order: zero_bubble pp in every chunk (ZB-H1, Qi et al. 2024), the V schedules 2 pp passes in all; dualpipev runs a
    forward pass while a backward pass runs, and has one more.
    """
    if schedule == "gpipe":
        return (microbatches,) * chunks
    if schedule == "zero_bubble":
        return (min(pp, microbatches),) * chunks
    if schedule in ("zbv", "dualpipev"):
        first = 2 * pp - rank - (1 if schedule == "zbv" else 0)
        return min(first, microbatches), min(rank + 1, microbatches)
    if chunks == 1:
        return (min(pp - rank, microbatches),)
    total = chunks * microbatches
    passes = min(total, 2 * (pp - rank - 1) + (chunks - 1) * group + 1)
    return _interleaved_warmup(passes, chunks, microbatches, group)


def waiting_for_weights(schedule: Schedule, pp: int, chunks: int, rank: int, microbatches: int) -> tuple[int, int]:
    """Return how many passes of a rank, at most, wait for their gradients of weights, and how many others it then has.

    Schedules that split the backward pass delay weights into the bubble, on later ranks by more (Qi et al. 2024). For
    zbv with fewer than 2 pp microbatches it is a bound.
    """
    if schedule == "zero_bubble":
        waiting = min(rank + 1, microbatches)
        return waiting, chunks * min(pp, microbatches) - waiting
    waiting = min(2 * rank, 2 * (microbatches - pp)) + 1 if schedule == "zbv" else rank + 1
    return waiting, pp - 1 - rank


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
