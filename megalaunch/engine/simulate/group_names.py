"""Name a process group by the mesh axes that it spans. Only its ranks count, not which code created it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import combinations

from megalaunch.plan.topology import RankGrid, Topology


class GroupNames:
    """Names of the process groups of one rank: "tp", "dp", "cp+dp", "pp", "world", ..."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self._topology, self._rank = topology, rank

    def get(self, ranks: tuple[int, ...]) -> str:
        """Return the name of a group, or its size if no set of axes spans it."""
        return self._known.get(tuple(sorted(ranks)), f"{len(ranks)} ranks")

    @cached_property
    def _known(self) -> dict[tuple[int, ...], str]:
        known: dict[tuple[int, ...], str] = {}
        for count in range(1, 5):
            for grid in self._grids():
                axes = [name for name, size in grid.axes if size > 1]
                for chosen in combinations(axes, count):
                    known.setdefault(tuple(grid.group(self._rank, *chosen)), "+".join(chosen).replace("_", " "))
            if count == 1:
                known.setdefault(tuple(range(self._topology.world)), "world")
        return known

    def _grids(self) -> Iterator[RankGrid]:
        """Yield the dense grid and the expert grid; each also with its dp split into shard and replicate axes."""
        t = self._topology
        yield t.dense_grid
        yield t.sharding_grid
        yield t.expert_grid
        if t.has_experts:
            yield t.expert_sharding_grid
