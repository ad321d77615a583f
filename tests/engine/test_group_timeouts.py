"""Every group of a run waits as long as `launcher.hang_timeout` says, and none as long as torch would."""

from __future__ import annotations

import datetime
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import small_spec
from slow_cases import slow_but

from megalaunch.engine.checkpoint import coordination
from megalaunch.engine.mesh import make_mesh
from megalaunch.plan.topology import Topology

LIMIT = datetime.timedelta(seconds=1.5)


def limits() -> dict[str, float]:
    """Seconds of every group that this rank is in, by description."""
    return {
        f"{number} {group.group_desc}": group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for number, group in enumerate(dist.distributed_c10d._world.pg_map)
    }


EXPERTS = {"num_experts": 4, "top_k": 2}


@pytest.mark.parametrize(
    ("layout", "moe"),
    slow_but(
        [
            ({"tp": 2, "pp": 2}, {}),
            ({"cp": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}, {}),
            ({"dp": 4, "ep": 2}, EXPERTS),
            ({"dp": 4, "ep": 2, "etp": 2}, EXPERTS),
        ],
        ({"tp": 2, "pp": 2}, {}),
        ({"dp": 4, "ep": 2, "etp": 2}, EXPERTS),
    ),
)
def test_every_group_of_a_layout_has_it(layout, moe):
    layout = {f"parallel__{key}": size for key, size in layout.items()}
    topology = Topology.from_spec(small_spec(**layout, model__moe=moe))

    def look() -> dict[str, float]:
        dist.distributed_c10d._set_pg_timeout(LIMIT, dist.group.WORLD)
        make_mesh(topology, torch.device("cpu"), dist.get_rank())
        return limits()

    for found in run_ranks(4, look):
        assert len(found) > 3
        assert set(found.values()) == {1.5}, found


def test_a_rank_that_does_not_come_is_not_waited_for():
    topology = Topology.from_spec(small_spec(parallel__tp=2, parallel__pp=2))

    def wait() -> float:
        dist.distributed_c10d._set_pg_timeout(LIMIT, dist.group.WORLD)
        mesh = make_mesh(topology, torch.device("cpu"), dist.get_rank())
        began = time.monotonic()
        if dist.get_rank() == 0:  # rank 1, of its group, is busy elsewhere
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.all_reduce(torch.ones(1), group=mesh.world_mesh.get_group("tp"))
        else:
            time.sleep(LIMIT.total_seconds() + 1.5)
        return time.monotonic() - began

    assert run_ranks(4, wait)[0] < 20


def test_the_group_of_checkpoints_too(monkeypatch):
    """On a device it is a group of its own, over gloo."""

    def look() -> float:
        dist.distributed_c10d._set_pg_timeout(LIMIT, dist.group.WORLD)
        monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
        group = coordination.coordination_group()
        assert group is not dist.group.WORLD
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert run_ranks(2, look) == [1.5, 1.5]


def test_a_group_that_was_destroyed_is_not_kept():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        coordination.run_on_rank0(lambda: None)
        kept = weakref.ref(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert kept() is None, "a process that is forked from this one would wait for its threads"
