"""Select one context-parallel communication type for all layers, to predict memory and time."""

from __future__ import annotations

from collections import Counter

from megalaunch.config.schema.parallel import ContextCommType, ParallelSpec


def most_common_cp_comm_type(parallel: ParallelSpec) -> ContextCommType:
    """Return the type of most layers; the default for an empty list, which a rule reports.

    For dynamic context parallelism return "allgather", the worst case, since a plan does not have the documents: one as
    long as its sample is sharded over all ranks, and each rank gets all its keys and values.
    """
    if parallel.dynamic_context_parallel:
        return "allgather"
    ways = parallel.cp_comm_type
    if isinstance(ways, str):
        return ways
    return Counter(ways).most_common(1)[0][0] if ways else "p2p"
