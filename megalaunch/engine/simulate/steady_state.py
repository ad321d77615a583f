"""How many microbatches show what all of a step would: in the steady state every further one adds the same."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.config.schema import RunSpec
from megalaunch.plan.topology import Topology


def enough_microbatches(spec: RunSpec, topology: Topology) -> Iterator[tuple[int, int]]:
    """Numbers of microbatches past the pipeline's warm-up, and how many more show what each further one adds.

    The first does as a rule. None where computing all of the step's is no more work.
    """
    p = spec.parallel
    several = topology.pp > 1 and p.schedule not in ("gpipe", "1f1b")
    group = (p.microbatch_group_size_per_vp_stage or topology.pp) if several else 1
    # The first rank of 1F1B warms up for pp microbatches, of schedules with several stages a rank for twice as many.
    warm = 2 if topology.pp == 1 else (2 * topology.pp + 2 if several else topology.pp + 1)
    fewer = warm + (topology.microbatches - warm) % group
    while topology.microbatches > 2 * fewer + group:
        yield fewer, group
        fewer += group * max(1, fewer // group)
