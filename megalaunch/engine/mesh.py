"""One world of ranks as named axes; the only file that makes device meshes."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megalaunch.plan.topology import Topology

# Outermost first: neighbouring ranks share a tensor-parallel group (Megatron's order tp-cp-dp-pp).
# Context-parallel ranks share parameters as data-parallel ones do, so both lie on one axis for `fully_shard`.
AXES = ("pp", "dp_replicate", "shard", "tp")


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it; `group` is the name of its process group."""

    name: str
    size: int = 1
    rank: int = 0
    group: str = ""

    @classmethod
    def from_mesh(cls, grid: DeviceMesh, name: str) -> Axis:
        """The axis `name` of a grid."""
        return cls(name, grid[name].size(), grid.get_local_rank(name), grid.get_group(name).group_name)


@dataclass(frozen=True)
class Mesh:
    """The dense grid of ranks, and this rank's place in it."""

    device: torch.device
    topology: Topology
    rank: int
    world_mesh: DeviceMesh
    cp_mesh: DeviceMesh
    cp_hierarchy_mesh: DeviceMesh | None = None

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What `fully_shard` divides over: (shard), or (dp_replicate, shard) with several replicas."""
        return self.world_mesh["dp_replicate", "shard"] if self.topology.dp_replicate > 1 else self.world_mesh["shard"]

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
        """The context-parallel axis: ranks that share each sample."""
        return Axis.from_mesh(self.cp_mesh, "cp") if self.topology.cp > 1 else Axis("cp")

    @cached_property
    def cp_hierarchy(self) -> tuple[Axis, Axis] | None:
        """The context-parallel axis as two, neighbours and the groups of neighbours, where a hierarchy is given."""
        return (
            None
            if self.cp_hierarchy_mesh is None
            else (
                Axis.from_mesh(self.cp_hierarchy_mesh, "cp_inner"),
                Axis.from_mesh(self.cp_hierarchy_mesh, "cp_outer"),
            )
        )

    @property
    def is_loss_rank(self) -> bool:
        """True on the one rank of each group of equals that reports its samples' tokens and loss to sums over all."""
        return self.tp.rank == 0 and self.pp.rank == self.last_stage_rank

    @property
    def last_stage_rank(self) -> int:
        """The pp rank of the head and its loss."""
        return self.topology.last_stage_rank

    @property
    def pp_group(self) -> ProcessGroup:
        """The pipeline-parallel axis as a group."""
        return self.world_mesh.get_group("pp")

    @property
    def dp_size(self) -> int:
        """Ranks that see different samples."""
        return self.topology.dp

    @property
    def dp_rank(self) -> int:
        """Which of the `data_size` shares of a batch is this rank's."""
        return self.topology.dense_grid.coordinates(self.rank)["dp"]


def make_mesh(topology: Topology, device: torch.device, rank: int) -> Mesh:
    """The mesh of an initialised process group of `topology.world` ranks."""
    t = topology
    grid = init_device_mesh(device.type, (t.pp, t.dp_replicate, t.dp_shard * t.cp, t.tp), mesh_dim_names=AXES)
    samples = grid
    if t.cp > 1:
        samples = init_device_mesh(device.type, (t.pp * t.dp, t.cp, t.tp), mesh_dim_names=("samples", "cp", "tp"))
    levels = None
    if t.cp_hierarchy:
        inner, outer = t.cp_hierarchy
        names = ("samples", "cp_outer", "cp_inner", "tp")
        levels = init_device_mesh(device.type, (t.pp * t.dp, outer, inner, t.tp), mesh_dim_names=names)
    for mesh in (grid, samples, levels):
        for group in [] if mesh is None else mesh.get_all_groups():
            keep_timeout(group)
    return Mesh(device, topology, rank, grid, samples, levels)


def world_timeout() -> datetime.timedelta | None:
    """How long a collective of all ranks waits: `launcher.hang_timeout`, see `join`. None for a backend without a limit."""
    limits = [backend.options._timeout for backend in _backends(_world())]
    return max(limits, default=None)


def keep_timeout(group: ProcessGroup) -> None:
    """Have a group wait as long as the world does; torch's own is 30 minutes with gloo and 10 with NCCL."""
    limit = world_timeout()
    for backend in [] if limit is None else _backends(group):
        backend._set_default_timeout(limit)


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "joined before"
    return world


def _backends(group: ProcessGroup) -> list[Any]:
    """Those of a group that have a time-out; a simulated one has none."""
    found = [group._get_backend(device) for device in group._device_types]
    return [backend for backend in found if hasattr(getattr(backend, "options", None), "_timeout")]
