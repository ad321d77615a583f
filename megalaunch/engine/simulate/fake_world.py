"""Simulate any rank of any world in one process: torch's fake process group, whose collectives send nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megalaunch.engine.mesh import Mesh, make_mesh
from megalaunch.engine.torch_private import clear_dtensor_cache, init_fake_process_group
from megalaunch.plan.topology import Topology


@contextmanager
def fake_mesh(topology: Topology, rank: int) -> Iterator[Mesh]:
    """Return the device mesh of `rank` in a fake process group, which is destroyed at the end of the context.

    Raises RuntimeError if this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a deep plan needs a process without a process group of its own")
    clear_dtensor_cache()
    init_fake_process_group(rank, topology.world)
    try:
        mesh = make_mesh(topology, torch.device("cpu"), rank)
        # Create the axes now, with real tensors: a search in fake ones fails.
        _ = mesh.tp, mesh.pp, mesh.cp, mesh.expert_parallel, mesh.expert_fsdp_mesh
        yield mesh
    finally:
        dist.destroy_process_group()
        clear_dtensor_cache()
