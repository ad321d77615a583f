"""Device meshes and axes of a run: named axes over all ranks. No other file creates a device mesh or its groups."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.torch_private import group_timeouts, set_group_timeout
from megalaunch.plan.topology import RankGrid, Topology


@dataclass(frozen=True)
class Axis:
    """One mesh axis on this rank: its size, this rank's index on it, and the name of its process group."""

    name: str
    size: int = 1
    rank: int = 0
    group: str = ""

    @classmethod
    def from_mesh(cls, grid: DeviceMesh, name: str) -> Axis:
        """Return the axis `name` of a device mesh."""
        return cls(name, grid[name].size(), grid.get_local_rank(name), grid.get_group(name).group_name)


@dataclass(frozen=True)
class Mesh:
    """The device meshes of the dense layers and of the routed experts, and this rank's coordinates in them.

    Attributes:
        world_mesh: The axes (pp, dp_replicate, dp_shard, tp), where dp_shard includes the context-parallel ranks.
        expert_mesh: The axes (pp, edp_replicate, edp_shard, ep, etp); None: that of the dense layers serves.
        cp: The context-parallel axis: each sample is sharded over its ranks.
        cp_hierarchy: The context-parallel axis as (inner, outer), for `cp_comm_type=a2a+p2p`; None without a hierarchy.
        expert_parallel: The ranks that exchange tokens: ep, and within it etp, whose ranks hold shards of the same
            experts.
    """

    device: torch.device
    topology: Topology
    rank: int
    world_mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    cp: Axis = Axis("cp")
    cp_hierarchy: tuple[Axis, Axis] | None = None
    expert_parallel: Axis = Axis("ep")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh that `fully_shard` takes: (dp_shard), or (dp_replicate, dp_shard) for HSDP.

        With outer steps each replica has a mesh of its own: gradients are not reduced over replicas.
        """
        return (
            self.world_mesh["dp_replicate", "dp_shard"]
            if self.topology.gradient_group.dp_replicate > 1
            else self.world_mesh["dp_shard"]
        )

    @cached_property
    def replicas(self) -> Axis:
        """The axis of the replicas of the model; without sharding every data-parallel rank is one."""
        return Axis.from_mesh(self.world_mesh, "dp_replicate")

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The mesh that `fully_shard` takes for routed experts: (edp_shard), or (edp_replicate, edp_shard) for HSDP.

        The same object as `fsdp_mesh` if the ranks of a stage are the same along both.
        """
        if self.expert_mesh is None:
            return self.fsdp_mesh
        replicas = self.topology.edp_replicate > 1
        return self.expert_mesh["edp_replicate", "edp_shard"] if replicas else self.expert_mesh["edp_shard"]

    @property
    def expert_shards_mesh(self) -> DeviceMesh | None:
        """The mesh over which experts are sharded before FSDP: those of (ep, etp) above 1; None if both are 1."""
        sizes = {"ep": self.topology.ep, "etp": self.topology.etp}
        axes = tuple(axis for axis, size in sizes.items() if size > 1)
        return None if self.expert_mesh is None or not axes else self.expert_mesh[axes]

    @cached_property
    def tp(self) -> Axis:
        """The tensor-parallel axis."""
        return Axis.from_mesh(self.world_mesh, "tp")

    @cached_property
    def pp(self) -> Axis:
        """The pipeline-parallel axis."""
        return Axis.from_mesh(self.world_mesh, "pp")

    @cached_property
    def stage_group(self) -> ProcessGroup:
        """The process group of all ranks of this pipeline stage. All ranks read it first at the same time."""
        grid = self.topology.dense_grid
        made = _make_group("stage", grid.groups(*(name for name, _ in grid.axes if name != "pp")), may_be_world=False)
        keep_timeout(made)
        return made

    @property
    def uses_gloo(self) -> bool:
        """True if collectives run through gloo, on CPUs: its reduce-scatter is slow, and there are no streams."""
        return platform_of(self.device).facts.process_group_backend == "gloo"

    @property
    def is_loss_rank(self) -> bool:
        """True on the rank (tp 0, last pipeline stage) that contributes its token counts and losses to global sums."""
        return self.tp.rank == 0 and self.pp.rank == self.last_stage_rank

    @property
    def last_stage_rank(self) -> int:
        """The pp rank that holds the head and computes the loss."""
        return self.topology.last_stage_rank

    @property
    def pp_group(self) -> ProcessGroup:
        """The process group of the pipeline-parallel axis."""
        return self.world_mesh.get_group("pp")

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks: they read different samples."""
        return self.topology.dp

    @property
    def dp_rank(self) -> int:
        """Index of this rank's part of a batch, 0 .. dp_size - 1."""
        return self.topology.dense_grid.coordinates(self.rank)["dp"]


def make_mesh(topology: Topology, device: torch.device, rank: int) -> Mesh:
    """Create the meshes. The process group of `topology.world` ranks must be initialised."""
    groups = _AxisGroups(device, rank)
    # Context-parallel ranks hold the same parameters as data-parallel ranks: `fully_shard` takes one axis of both.
    world = groups.mesh(topology.sharding_grid.merge(("cp", "dp_shard"), "dp_shard"))
    experts = groups.mesh(topology.expert_sharding_grid) if topology.has_expert_mesh else None
    cp, levels, exchange = Axis("cp"), None, Axis("ep")
    if topology.cp > 1:
        cp = groups.axis(topology.dense_grid, "cp")
    if topology.hierarchical_context_parallel_sizes:
        inner, outer = topology.hierarchical_context_parallel_sizes
        split = topology.dense_grid.split("cp", ("cp_inner", inner), ("cp_outer", outer))
        levels = groups.axis(split, "cp_inner"), groups.axis(split, "cp_outer")
    if topology.has_expert_mesh and topology.ep * topology.etp > 1:
        exchange = groups.axis(topology.expert_grid.merge(("etp", "ep"), "ep"), "ep")
    return Mesh(device, topology, rank, world, experts, cp, levels, exchange)


class _AxisGroups:
    """Makes the process groups of axes, one for each set of ranks and purpose.

    A communicator runs one collective after another. Axes share one if nothing overlaps their collectives: the tp axes
    of all grids, pp, cp, etp. Gathers of parameters and reductions of gradients run beside those of the layers, and the
    exchange of tokens beside a shared expert's: dp and ep axes share none with others. Nor do the dp axes of experts
    with those of other parameters, not even one of a single rank: FSDP2 refuses two meshes over one group.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._made: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}

    def mesh(self, grid: RankGrid) -> DeviceMesh:
        """Return the device mesh of a grid; torch's meshes have the fastest-changing axis last."""
        names = tuple(name for name, _ in reversed(grid.axes))
        groups = [self._group(grid, name) for name in names]
        return DeviceMesh.from_group(groups, self._device.type, _ranks(grid), mesh_dim_names=names)

    def axis(self, grid: RankGrid, name: str) -> Axis:
        """Return an axis of a grid that needs no device mesh."""
        size, rank = dict(grid.axes)[name], grid.coordinates(self._rank)[name]
        return Axis(name, size, rank, self._group(grid, name).group_name)

    def _group(self, grid: RankGrid, name: str) -> ProcessGroup:
        """Return this rank's group along an axis. All ranks call this for the same axes in the same order."""
        position = next(dim for dim, (axis, _) in enumerate(reversed(grid.axes)) if axis == name)
        sets = _ranks(grid).movedim(position, -1).flatten(end_dim=-2).tolist()
        mine = next(tuple(ranks) for ranks in sets if self._rank in ranks)
        # Two ranks of a set tell its axis's stride, and so all other sets: ranks agree on what they make.
        key = _PURPOSES[name], mine
        if key not in self._made:
            is_shared = dist.group.WORLD in self._made.values()
            self._made[key] = _make_group(name, sets, may_be_world=not is_shared)
            keep_timeout(self._made[key])
        return self._made[key]


_PURPOSES = {
    **dict.fromkeys(("pp", "tp", "cp", "cp_inner", "cp_outer", "etp"), "layers"),
    **dict.fromkeys(("dp_shard", "dp_replicate"), "sharding"),
    **dict.fromkeys(("edp_shard", "edp_replicate"), "sharding of experts"),
    "ep": "exchange",
}


def _ranks(grid: RankGrid) -> Tensor:
    """Return the ranks of a grid, the fastest-changing axis last."""
    return torch.arange(grid.world, device="cpu").view([size for _, size in reversed(grid.axes)])


def _make_group(axis: str, sets: list[list[int]], *, may_be_world: bool) -> ProcessGroup:
    """Make a group of each set of ranks and return this rank's, as torch's device meshes do.

    The group of all ranks exists, and serves one purpose. If it is bound to a device it is split, in one call for all
    sets.
    """
    world = dist.group.WORLD
    assert world is not None, "the process group is initialized first"
    if len(sets) == 1 and may_be_world:
        return world
    made, description = None, f"mesh_{axis}"
    if world.bound_device_id is not None:
        made = dist.split_group(world, sets, group_desc=description)
    else:
        for ranks in sets:
            group = dist.new_group(ranks, group_desc=description)
            made = group if dist.get_rank() in ranks else made
    assert made is not None, "a rank is in one of the sets"
    return made


def world_timeout() -> datetime.timedelta | None:
    """Return the timeout of a collective of all ranks; None for a backend that has none."""
    world = dist.group.WORLD
    assert world is not None, "the process group is initialized first"
    return max(group_timeouts(world), default=None)


def keep_timeout(group: ProcessGroup) -> None:
    """Give a group the timeout of the world group; torch's default is 30 minutes with gloo and 10 with NCCL."""
    limit = world_timeout()
    if limit is not None:
        set_group_timeout(group, limit)
