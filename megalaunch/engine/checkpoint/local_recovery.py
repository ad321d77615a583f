"""Choose the local checkpoint from which a run continues, and the node from which each rank gets its shard.

Pure functions of what all nodes have reported: every rank comes to the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megalaunch.rundir.checkpoint.local_shards import LocalShard
from megalaunch.rundir.resumes import dropping_resume

_SHOWN = 8  # ranks named in a message


@dataclass
class LocalCheckpoint:
    """The shards of one step that one attempt saved.

    Attributes:
        step: The step.
        attempt: The attempt.
        resumes: The number of resumes before it was saved.
        shards: Of each rank, its description by the number of the node that holds it or a copy.
    """

    step: int
    attempt: int
    resumes: int
    shards: dict[int, dict[int, LocalShard]] = field(default_factory=dict)

    @property
    def age(self) -> tuple[int, int, int]:
        """What a newer one has more of."""
        return self.step, self.resumes, self.attempt

    def leave_out(self, rank: int, node: int) -> None:
        """Leave out the shard of a rank on a node, which is damaged."""
        del self.shards[rank][node]
        if not self.shards[rank]:
            del self.shards[rank]


def newest_first(held: Sequence[Sequence[LocalShard]], after: int) -> list[LocalCheckpoint]:
    """Return the local checkpoints of steps after `after`, complete or not, the newest first.

    Args:
        held: the shards in the folder of each node.
        after: the step of the newest checkpoint in the run directory.
    """
    found: dict[tuple[int, int, int], LocalCheckpoint] = {}
    for node, shards in enumerate(held):
        for shard in shards:
            if shard.step > after:
                checkpoint = LocalCheckpoint(shard.step, shard.attempt, shard.resumes)
                checkpoint = found.setdefault(checkpoint.age, checkpoint)
                checkpoint.shards.setdefault(shard.rank, {})[node] = shard
    return [found[key] for key in sorted(found, reverse=True)]


def problem_of(checkpoint: LocalCheckpoint, layouts: Sequence[str], resumes: Sequence[int]) -> str | None:
    """Return why a run cannot continue from a local checkpoint; None if it can.

    Args:
        checkpoint: the local checkpoint.
        layouts: the digest of the layout of each rank of the run.
        resumes: the steps from which the run was continued so far.
    """
    dropped = dropping_resume(checkpoint.step, checkpoint.resumes, resumes)
    if dropped is not None:
        return f"attempt {checkpoint.attempt} saved it, and a later attempt continued from step {dropped}"
    shards = {rank: next(iter(nodes.values())) for rank, nodes in checkpoint.shards.items()}
    others = {shard.world for shard in shards.values()} - {len(layouts)}
    if others:
        return f"{min(others)} ranks saved it, and the run has {len(layouts)}"
    missing = [rank for rank in range(len(layouts)) if rank not in shards]
    if missing:
        return f"no node holds the shard of {describe_ranks(missing)}"
    changed = [rank for rank, layout in enumerate(layouts) if shards[rank].layout != layout]
    if changed:
        return f"the layout has changed: {describe_ranks(changed)} held other slices of the tensors"
    return None


def choose_sources(checkpoint: LocalCheckpoint, devices_per_node: int) -> Mapping[int, int]:
    """Return for each rank the node from which it gets its shard: its own if that holds it, else the first."""
    return {
        rank: rank // devices_per_node if rank // devices_per_node in nodes else min(nodes)
        for rank, nodes in sorted(checkpoint.shards.items())
    }


def holder(rank: int, node: int, devices_per_node: int) -> int:
    """Return the rank that reads and sends the shard of `rank` on a node that holds it."""
    return node * devices_per_node + rank % devices_per_node


def transfers(sources: Mapping[int, int], devices_per_node: int) -> list[tuple[int, int]]:
    """Return the transfers between nodes in their order: (rank that gets its shard, rank that sends it)."""
    return [
        (rank, holder(rank, node, devices_per_node))
        for rank, node in sources.items()
        if node != rank // devices_per_node
    ]


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text, the first ones of many."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
