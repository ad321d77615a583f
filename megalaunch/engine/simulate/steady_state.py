"""How many microbatches to simulate: in the steady state of a pipeline schedule each further one adds the same."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec


def enough_microbatches(spec: RunSpec, topology: Topology) -> Iterator[tuple[int, int]]:
    """Yield (a number of microbatches past the pipeline's warm-up, how many more to run for the growth per group).

    The first pair usually suffices. Nothing is yielded if running all microbatches of the step is no more work.
    """
    p = spec.parallel
    several = topology.pp > 1 and p.schedule not in ("gpipe", "1f1b")
    group = (p.microbatch_group_size_per_vp_stage or topology.pp) if several else 1
    # The first rank's warm-up has pp microbatches in 1F1B, and twice as many with several stages a rank.
    warm = 2 if topology.pp == 1 else (2 * topology.pp + 2 if several else topology.pp + 1)
    fewer = warm + (topology.microbatches - warm) % group
    while topology.microbatches > 2 * fewer + group:
        yield fewer, group
        fewer += group * max(1, fewer // group)
