"""Read which nodes an event names as slower than the others: launchers that have spare ones replace them."""

from __future__ import annotations

from megalaunch.rundir.jsonl import Record

CAUSES = ("compute", "cpu")
"""Causes of a straggler that is due to its node; tokens may be slow for every node."""
COMPUTED_SLOWER = "computed slower than the others"
HAD_SLOWER_LINKS = "had slower links than the others"


def slow_nodes(event: Record) -> tuple[tuple[int, ...], str]:
    """Return the nodes that an event names as slow, and in what way; none for other events."""
    match event:
        case {"event": "straggler", "cause": cause, "nodes": list(nodes)} if cause in CAUSES:
            return tuple(nodes), COMPUTED_SLOWER
        case {"event": "network", "slow_nodes": list(nodes)}:
            return tuple(nodes), HAD_SLOWER_LINKS
    return (), ""
