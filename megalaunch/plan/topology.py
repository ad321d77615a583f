"""The topology of a world: ranks as the dense grid and the expert grid, in Megatron's order."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from megalaunch.plan.stage_validation import V_SCHEDULES
from megalaunch.plan.world import (
    data_parallel_size,
    expert_data_parallel_size,
    num_microbatches,
    replicas_and_shards,
    world_size,
)
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ContextCommType, ParallelSpec


@dataclass(frozen=True)
class RankGrid:
    """Named axes over ranks 0 .. world-1, the fastest-changing axis first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        coordinates = {}
        for name, size in self.axes:
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def group(self, rank: int, *names: str) -> list[int]:
        """Return the ranks that differ from `rank` on the named axes only, `rank` included, ascending."""
        members = [rank]
        stride = 1
        coordinates = self.coordinates(rank)
        for name, size in self.axes:
            if name in names:
                members = [m + (i - coordinates[name]) * stride for m in members for i in range(size)]
            stride *= size
        return sorted(members)

    def groups(self, *names: str) -> list[list[int]]:
        """Return every such group, ordered by its first rank."""
        return [list(group) for group in sorted({tuple(self.group(rank, *names)) for rank in range(self.world)})]

    def split(self, name: str, *parts: tuple[str, int]) -> RankGrid:
        """Return the grid with an axis split into several, the fastest-changing first; every rank keeps its place."""
        axes = [part for axis in self.axes for part in (parts if axis[0] == name else (axis,))]
        split = RankGrid(tuple(axes))
        if split.world != self.world:
            raise ValueError(f"{parts} is no split of {name} in {self.axes}")
        return split

    def merge(self, names: tuple[str, ...], merged: str) -> RankGrid:
        """Return the grid with neighbouring axes, the fastest-changing first, as one; every rank keeps its place."""
        present = [name for name, _ in self.axes]
        first = present.index(names[0])
        end = first + len(names)
        if tuple(present[first:end]) != names:
            raise ValueError(f"{names} are no neighbouring axes of {self.axes}")
        size = math.prod(size for _, size in self.axes[first:end])
        return RankGrid((*self.axes[:first], (merged, size), *self.axes[end:]))


@dataclass(frozen=True)
class Topology:
    """The degrees of a resolved spec, and its two grids (world = dp pp cp tp = edp pp ep etp).

    Attributes:
        dp_shard: data-parallel ranks that shard one copy of the states; dp = dp_replicate * dp_shard.
        dp_replicate: the number of copies; without sharding every data-parallel rank is a replica.
        edp_replicate: the number of copies of a routed expert's states among the edp ranks that hold the expert.
        microbatches: per rank and step.
        last_stage_rank: the pp rank that holds the head.
        hierarchical_context_parallel_sizes: the (inner, outer) sizes of cp, if hierarchical.
        dynamic_context_parallel: documents are assigned to context-parallel ranks by their length.
        has_experts: the model is a mixture of experts.
        outer_steps: steps after which replicas average what they learned apart; 0: they reduce gradients every step.
    """

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    edp: int
    dp_replicate: int
    dp_shard: int
    edp_replicate: int
    micro_batch_size: int
    microbatches: int
    devices_per_node: int
    nodes: int
    last_stage_rank: int
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    dynamic_context_parallel: bool = False
    has_experts: bool = False
    outer_steps: int = 0

    @classmethod
    def from_spec(cls, spec: RunSpec) -> Topology:
        """Return the topology of a resolved and checked spec; raises ValueError if a degree does not divide."""
        p, batch = spec.parallel, spec.batch
        world = world_size(spec.cluster)
        if p.dp is None or batch.micro_batch_size is None or world is None:
            raise ValueError("the spec is not resolved: dp, micro_batch_size, nodes or devices_per_node is open")
        if p.dp != data_parallel_size(world, p):
            raise ValueError(f"dp {p.dp} x pp {p.pp} x cp {p.cp} x tp {p.tp} is not the world of {world}")
        edp, (replicas, shards) = expert_data_parallel_size(world, p), replicas_and_shards(p.dp, p)
        if edp is None:
            raise ValueError(f"pp {p.pp} x ep {p.ep} x etp {p.etp or 1} does not divide the world of {world}")
        if shards is None:
            raise ValueError(f"dp_replicate {replicas} does not divide dp {p.dp}")
        has_experts = spec.model.moe.num_experts is not None
        edp_replicate = edp if p.data_sharding == "no_shard" else p.dp_replicate
        if has_experts and edp % edp_replicate:
            raise ValueError(f"dp_replicate {edp_replicate} does not divide expert dp {edp}")
        microbatches = num_microbatches(batch.global_batch_size, batch.micro_batch_size, p.dp)
        if microbatches is None:
            raise ValueError(
                f"micro_batch_size {batch.micro_batch_size} x dp {p.dp} does not divide "
                f"global_batch_size {batch.global_batch_size}"
            )
        return cls(
            tp=p.tp,
            pp=p.pp,
            cp=p.cp,
            dp=p.dp,
            ep=p.ep,
            etp=p.etp or 1,
            edp=edp,
            dp_replicate=replicas,
            dp_shard=shards,
            edp_replicate=edp_replicate,
            micro_batch_size=batch.micro_batch_size,
            microbatches=microbatches,
            devices_per_node=int(spec.cluster.devices_per_node),
            nodes=int(spec.cluster.nodes),
            last_stage_rank=0 if p.schedule in V_SCHEDULES else p.pp - 1,
            hierarchical_context_parallel_sizes=p.hierarchical_context_parallel_sizes if p.cp > 1 else (),
            dynamic_context_parallel=p.dynamic_context_parallel and p.cp > 1,
            has_experts=has_experts,
            outer_steps=p.outer_steps,
        )

    @property
    def gradient_group(self) -> Topology:
        """The topology of the ranks that reduce gradients in a step: with outer steps those of one replica."""
        return self if not self.outer_steps else replace(self, dp=self.dp_shard, dp_replicate=1)

    @property
    def has_expert_mesh(self) -> bool:
        """Whether routed experts are sharded over other ranks than dense layers."""
        return self.has_experts and not self.tp == self.ep == self.etp == 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def dense_grid(self) -> RankGrid:
        """The grid of all parameters but routed experts, in Megatron's order: neighbouring ranks share a tp group.

        The one definition of the order of ranks: device meshes are made of this grid.
        """
        return RankGrid((("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp)))

    @property
    def sharding_grid(self) -> RankGrid:
        """The dense grid with dp split into shards and replicas."""
        return self.dense_grid.split("dp", ("dp_shard", self.dp_shard), ("dp_replicate", self.dp_replicate))

    @property
    def expert_grid(self) -> RankGrid:
        """The grid of routed experts, over the same ranks and the same pipeline stages."""
        return RankGrid((("etp", self.etp), ("ep", self.ep), ("edp", self.edp), ("pp", self.pp)))

    @property
    def expert_sharding_grid(self) -> RankGrid:
        """The expert grid with edp split into shards and replicas."""
        shards = self.edp // self.edp_replicate
        return self.expert_grid.split("edp", ("edp_shard", shards), ("edp_replicate", self.edp_replicate))

    def coordinates(self, rank: int) -> str:
        """Return a rank's coordinates as text, without axes of size 1: "pp0 dp1 tp3"; "dp0" for a single process."""
        coordinates = self.dense_grid.coordinates(rank)
        named = [f"{axis}{coordinates[axis]}" for axis in ("pp", "dp", "cp", "tp") if getattr(self, axis) > 1]
        if self.ep > 1:
            named.append(f"ep{self.expert_grid.coordinates(rank)['ep']}")
        return " ".join(named) or "dp0"


def most_common_cp_comm_type(parallel: ParallelSpec) -> ContextCommType:
    """Return the context-parallel communication type of most layers, by which memory and time are predicted.

    The default for an empty list, which a rule reports. For dynamic context parallelism return "allgather", the worst
    case, since a plan does not have the documents: one as long as its sample is sharded over all ranks, and each rank
    gets all its keys and values.
    """
    if parallel.dynamic_context_parallel:
        return "allgather"
    types = parallel.cp_comm_type
    if isinstance(types, str):
        return types
    return Counter(types).most_common(1)[0][0] if types else "p2p"
