"""Which way of exchanging keys stands for all layers, where memory and time are predicted."""

from __future__ import annotations

from collections import Counter

from megalaunch.config.schema.parallel import ContextExchange, ParallelSpec


def most_common_cp_comm_type(parallel: ParallelSpec) -> ContextExchange:
    """The one of most layers; of an empty list, which its rule reports, the default.

    Of documents dealt out by length the worst case, since a plan does not know them: one as long as its sample is
    cut over all ranks, and each gets all its keys.
    """
    if parallel.dynamic_context_parallel:
        return "allgather"
    ways = parallel.cp_comm_type
    if isinstance(ways, str):
        return ways
    return Counter(ways).most_common(1)[0][0] if ways else "p2p"
