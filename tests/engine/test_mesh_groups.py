"""Process groups of a layout: each set of ranks once for a purpose, and none that is not used."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from oracle import small_spec
from slow_cases import slow_but

from megalaunch.engine import mesh
from megalaunch.engine.mesh import make_mesh
from megalaunch.plan.topology import Topology

EXPERTS = {"num_experts": 4, "top_k": 2}
TWO_LEVELS = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}
# The groups of more than one rank that rank 0 is in, beside that of all: a purpose and its ranks.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], set[tuple[str, tuple[int, ...]]]]] = {
    "pp2": (2, {"pp": 2}, {}, set()),
    # The first of several that span all ranks has the group of all.
    "cp2": (2, {"cp": 2}, {}, {("cp", (0, 1))}),
    "ep2": (2, {"dp": 2, "ep": 2}, EXPERTS, {("ep", (0, 1))}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}, {}, {("tp", (0, 1)), ("pp", (0, 2))}),
    "tp2cp2": (4, {"tp": 2, "cp": 2}, {}, {("tp", (0, 1)), ("dp_shard", (0, 2)), ("cp", (0, 2))}),
    "tp2cp2dp2": (
        8,
        {"tp": 2, "cp": 2, "dp": 2},
        {},
        {("tp", (0, 1)), ("dp_shard", (0, 2, 4, 6)), ("cp", (0, 2))},
    ),
    "tp2cp4 two levels": (
        8,
        {"tp": 2, "cp": 4, **TWO_LEVELS},
        {},
        {
            ("tp", (0, 1)),
            ("dp_shard", (0, 2, 4, 6)),
            ("cp", (0, 2, 4, 6)),
            ("cp_inner", (0, 2)),
            ("cp_outer", (0, 4)),
        },
    ),
    "tp2cp2ep2": (
        4,
        {"tp": 2, "cp": 2, "ep": 2},
        EXPERTS,
        {("tp", (0, 1)), ("dp_shard", (0, 2)), ("edp_shard", (0, 2)), ("cp", (0, 2)), ("ep", (0, 1))},
    ),
    "tp2ep2etp2": (
        4,
        {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
        EXPERTS,
        {("tp", (0, 1)), ("dp_shard", (0, 2)), ("ep", (0, 2))},
    ),
}


def _groups(topology: Topology) -> list[tuple[str, tuple[int, ...]]]:
    """The groups that this rank is in after the meshes are made, by their first axis."""
    make_mesh(topology, torch.device("cpu"), dist.get_rank())
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    return [(group.group_desc.removeprefix("mesh_"), tuple(dist.get_process_group_ranks(group))) for group in groups]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "pp2", "tp2cp2", "tp2ep2etp2"))
def test_each_set_of_ranks_once_for_a_purpose(layout):
    ranks, degrees, moe, expected = LAYOUTS[layout]
    spec = small_spec(**{f"parallel__{key}": value for key, value in {"dp": 1, **degrees}.items()}, model__moe=moe)
    made = run_ranks(ranks, _groups, Topology.from_spec(spec))
    assert {(axis, members) for axis, members in made[0] if len(members) > 1} == expected
    for groups in made:
        assert max(Counter(groups).values(), default=0) <= 1
        assert sum(len(members) == 1 for _, members in groups) <= 3  # of three purposes


def test_a_world_that_is_bound_to_a_device_is_split_once_for_all_sets(monkeypatch):
    """As NCCL's: a call for each set would split the communicator as often."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    split = mock.Mock()
    monkeypatch.setattr(mesh, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world), split_group=split))
    assert mesh._make_group("tp", [[0, 1], [2, 3]], may_be_world=True) is split.return_value
    split.assert_called_once_with(world, [[0, 1], [2, 3]], group_desc="mesh_tp")
