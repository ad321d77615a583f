"""Count how often torch's pipeline runtime all-gathers the weights of a virtual stage in one step.

It keeps the next ACTIVE_CHUNKS stages of a rank gathered and frees the others, so that the weights of more stages are
gathered again and again. Read from the end of the step, the next stages are the entries of a cache that evicts the
least recently used: each miss is an all-gather.
"""

from __future__ import annotations

from functools import lru_cache

from megalaunch.plan.stage_params import ACTIVE_CHUNKS
from megalaunch.schema.parallel import Schedule


@lru_cache(maxsize=4096)
def stage_gathers(
    schedule: Schedule, pp: int, chunks: int, rank: int, microbatches: int, group: int | None = None
) -> float:
    """Return the all-gathers of one of a rank's virtual stages in a step, as a mean over its stages.

    Args:
        schedule: `parallel.schedule`.
        pp: Pipeline ranks.
        chunks: Virtual stages of the rank.
        rank: Its pipeline rank.
        microbatches: Those of a step.
        group: Microbatches of a group of interleaved 1F1B; None: torch's own groups.
    """
    if chunks <= ACTIVE_CHUNKS:
        return 1.0
    size = group or microbatches // max(1, microbatches // pp)
    sizes = [min(size, microbatches - start) for start in range(0, microbatches, size)]
    forward = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    backward = [chunks - 1 - chunk for chunk in forward]
    if schedule == "zero_bubble":
        passes = _passes(forward, backward, (chunks - 1) * size + pp - 1 - rank, weights_after=rank)
    else:
        passes = _passes(forward, backward, (chunks - 1) * size + 2 * (pp - 1 - rank))
    return _misses(passes) / chunks


def _passes(forward: list[int], backward: list[int], warm: int, weights_after: int | None = None) -> list[int]:
    """Return the chunks of a step's passes in order: `warm` forward passes, then one forward and one backward in turn.

    Narayanan et al. 2021. With `weights_after` (zero bubble, Qi et al. 2024) the gradients of weights are passes of
    their own, that many backward passes after those of inputs.
    """
    passes = forward[:warm]
    for step, chunk in enumerate(backward):
        passes += [*forward[warm + step : warm + step + 1], chunk]
        if weights_after is not None and step >= weights_after:
            passes.append(backward[step - weights_after])
    if weights_after:
        passes += backward[-weights_after:]
    return passes


def _misses(passes: list[int]) -> int:
    """Return how often a chunk is not among the next ACTIVE_CHUNKS ones of the pass before."""
    kept: list[int] = []
    misses = 0
    for chunk in reversed(passes):
        if chunk in kept:
            kept.remove(chunk)
        else:
            misses += 1
            del kept[ACTIVE_CHUNKS - 1 :]
        kept.insert(0, chunk)
    return misses
