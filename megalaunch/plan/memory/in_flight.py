"""How many microbatches' activations a pipeline rank holds at its peak, by chunk."""

from __future__ import annotations

from functools import lru_cache

from megalaunch.config.schema.parallel import Schedule


@lru_cache(maxsize=65536)
def in_flight(schedule: Schedule, pp: int, chunks: int, rank: int, microbatches: int, group: int) -> tuple[int, ...]:
    """Microbatches alive in each chunk of a rank when it begins its first backward pass.

    1F1B: Narayanan et al. 2021a: pp - rank. Interleaved: Narayanan et al. 2021b, Megatron's warm-up of
    2 (pp - rank - 1) + (chunks - 1) group passes, and the one that follows. GPipe keeps all; the V schedules (Qi et
    al. 2024) keep as much as 1F1B's first rank on every rank.
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
    """The first chunk of a low rank waits long, the second returns at once: 2 pp chunk passes in all."""
    first = min(microbatches, 2 * pp - rank + extra)
    return first, min(microbatches, rank + 1)


def _interleaved_warmup(passes: int, chunks: int, microbatches: int, group: int) -> tuple[int, ...]:
    """The first forward passes by chunk: groups of microbatches go through all chunks before the next group."""
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
