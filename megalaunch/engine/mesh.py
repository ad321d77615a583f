"""Device meshes of a run: named axes over all ranks. No other file creates a device mesh."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    """The device meshes of the dense layers and of the routed experts, and this rank's coordinates in them."""

    device: torch.device
    topology: Topology
    rank: int
    world_mesh: DeviceMesh
    cp_mesh: DeviceMesh
    cp_hierarchy_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    expert_parallel_mesh: DeviceMesh | None = None

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
    def expert_parallel(self) -> Axis:
        """The ranks that exchange tokens: ep, and within it etp, whose ranks hold shards of the same experts."""
        if self.expert_parallel_mesh is None:
            return Axis("ep")
        return Axis.from_mesh(self.expert_parallel_mesh, "ep")

    @cached_property
    def tp(self) -> Axis:
        """The tensor-parallel axis."""
        return Axis.from_mesh(self.world_mesh, "tp")

    @cached_property
    def pp(self) -> Axis:
        """The pipeline-parallel axis."""
        return Axis.from_mesh(self.world_mesh, "pp")

    @cached_property
    def cp(self) -> Axis:
        """The context-parallel axis: each sample is sharded over its ranks."""
        return Axis.from_mesh(self.cp_mesh, "cp") if self.topology.cp > 1 else Axis("cp")

    @cached_property
    def cp_hierarchy(self) -> tuple[Axis, Axis] | None:
        """The context-parallel axis as (inner, outer), for `cp_comm_type=a2a+p2p`; None without a hierarchy."""
        return (
            None
            if self.cp_hierarchy_mesh is None
            else (
                Axis.from_mesh(self.cp_hierarchy_mesh, "cp_inner"),
                Axis.from_mesh(self.cp_hierarchy_mesh, "cp_outer"),
            )
        )

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
    dense = topology.dense_grid
    # Context-parallel ranks hold the same parameters as data-parallel ranks: `fully_shard` takes one axis of both.
    grid = _init_mesh(device, topology.sharding_grid.merge(("cp", "dp_shard"), "dp_shard"))
    samples = grid
    if topology.cp > 1:
        samples = _init_mesh(device, dense.merge(("dp", "pp"), "samples"))
    levels = None
    if topology.hierarchical_context_parallel_sizes:
        inner, outer = topology.hierarchical_context_parallel_sizes
        split = dense.split("cp", ("cp_inner", inner), ("cp_outer", outer))
        levels = _init_mesh(device, split.merge(("dp", "pp"), "samples"))
    experts, exchange = _init_expert_meshes(topology, device)
    for mesh in (grid, samples, levels, experts, exchange):
        for group in [] if mesh is None else mesh.get_all_groups():
            keep_timeout(group)
    return Mesh(device, topology, rank, grid, samples, levels, experts, exchange)


def _init_expert_meshes(topology: Topology, device: torch.device) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Create the meshes of routed experts and of their token exchange; None: that of the dense layers serves."""
    if not topology.has_expert_mesh:
        return None, None
    experts = _init_mesh(device, topology.expert_sharding_grid)
    if topology.ep * topology.etp == 1:
        return experts, None
    if topology.etp == 1:
        return experts, experts
    joined = topology.expert_grid.merge(("etp", "ep"), "ep").merge(("edp", "pp"), "rest")
    return experts, _init_mesh(device, joined)


def _init_mesh(device: torch.device, grid: RankGrid) -> DeviceMesh:
    """Create the device mesh of a grid; torch's meshes have the fastest-changing axis last."""
    names, sizes = zip(*reversed(grid.axes), strict=True)
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


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
