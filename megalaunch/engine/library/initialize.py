"""Join a process group and lay out its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.precision.backend_flags import set_backend_flags
from megalaunch.engine.process_group import destroy_process_group, init_process_group, local_device
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec


@contextmanager
def initialize(spec: RunSpec) -> Iterator[Mesh]:
    """Join the process group of a run, yield the device meshes of this rank, and leave the group. Collective.

    The ranks are those of torchrun's environment variables; without them this process is the only one. Where a process
    group exists, its ranks get meshes of this layout, and the group stays: two models may have different layouts.
    torch's flags of TF32, reductions and deterministic kernels are set as `precision` and `train.deterministic` say.

    Args:
        spec: A resolved run spec, the same on every rank.

    Raises:
        ValueError: The number of processes is not that of the layout.
        RuntimeError: A rank has no device of `platform.chip`.
    """
    topology = Topology.from_spec(spec)
    if dist.is_initialized():
        yield _make_mesh(spec, topology, _require_device(spec))
        return
    device = _join(spec)
    try:
        mesh = _make_mesh(spec, topology, device)
        yield mesh
    except BaseException:
        dist.destroy_process_group()  # without the barrier: other ranks may not come to it
        raise
    destroy_process_group()


def _join(spec: RunSpec) -> torch.device:
    """Initialize the process group of torchrun's environment variables, or one of this process alone."""
    if "RANK" in os.environ:
        device, problem = init_process_group(spec)
        if problem is not None:
            dist.destroy_process_group()
            raise RuntimeError(problem.reason)
        return device
    device = _require_device(spec)
    backends = platform_of(device).process_group_backends
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return device


def _require_device(spec: RunSpec) -> torch.device:
    device, problem = local_device(spec)
    if problem is not None:
        raise RuntimeError(problem.reason)
    return device


def _make_mesh(spec: RunSpec, topology: Topology, device: torch.device) -> Mesh:
    if dist.get_world_size() != topology.world:
        layout = " x ".join(f"{name} {size}" for name, size in topology.dense_grid.axes if size > 1) or "one process"
        raise ValueError(
            f"the layout ({layout}) is one of {topology.world} processes, and there are {dist.get_world_size()}: start "
            f"as many (torchrun --nproc-per-node {topology.world}), or change parallel.*"
        )
    set_backend_flags(spec, device)
    return make_mesh(topology, device, dist.get_rank())
