import pytest
from made_specs import resolved

from megalaunch.plan.topology import RankGrid, Topology, most_common_cp_comm_type
from megalaunch.schema import with_values
from megalaunch.schema.parallel import ParallelSpec

AXES = ("tp", "pp", "cp", "dp", "ep", "etp", "edp", "dp_replicate", "dp_shard", "edp_replicate")
DEFAULTS = dict.fromkeys((*AXES, "micro_batch_size", "microbatches", "nodes"), 1)


def topology(**degrees):
    values = DEFAULTS | degrees
    world = values["tp"] * values["pp"] * values["cp"] * values["dp"]
    return Topology(**values, devices_per_node=world, last_stage_rank=values["pp"] - 1)


def test_megatrons_dense_order_of_16_ranks():
    """Golden: produced by Megatron-LM's own rank generator for tp2 cp2 dp2 pp2."""
    grid = topology(tp=2, cp=2, dp=2, pp=2).dense_grid
    assert grid.world == 16
    assert grid.group(0, "tp") == [0, 1]
    assert grid.group(0, "cp") == [0, 2]
    assert grid.group(0, "dp") == [0, 4]
    assert grid.group(0, "pp") == [0, 8]
    assert grid.group(0, "dp", "cp") == [0, 2, 4, 6]
    assert grid.group(15, "tp") == [14, 15]
    assert grid.groups("pp")[-1] == [7, 15]


def test_megatrons_expert_order():
    """Golden: etp1 ep4 pp2 over 16 ranks."""
    grid = topology(dp=8, pp=2, ep=4, edp=2).expert_grid
    assert grid.group(0, "ep") == [0, 1, 2, 3]
    assert grid.group(0, "edp") == [0, 4]
    assert grid.group(0, "pp") == [0, 8]


def test_replicas_of_experts_are_the_slowest_ranks_of_edp():
    """HSDP: the replicas of experts are on the same nodes as those of the dense layers."""
    grid = topology(tp=2, dp=8, ep=2, edp=8, dp_replicate=2, dp_shard=4, edp_replicate=2).expert_sharding_grid
    assert grid.group(0, "ep") == [0, 1]
    assert grid.group(0, "edp_shard") == [0, 2, 4, 6]
    assert grid.group(0, "edp_replicate") == [0, 8]


def test_groups_of_an_axis_partition_the_world():
    grid = RankGrid((("tp", 2), ("cp", 3), ("dp", 2), ("pp", 2)))
    for names in (("tp",), ("cp", "dp"), ("tp", "pp"), ()):
        groups = grid.groups(*names)
        assert sorted(rank for group in groups for rank in group) == list(range(24))


def test_split_and_merged_axes_keep_the_order_of_ranks():
    grid = RankGrid((("tp", 2), ("cp", 3), ("dp", 4), ("pp", 2)))
    split = grid.split("dp", ("dp_shard", 2), ("dp_replicate", 2))
    assert split.axes == (("tp", 2), ("cp", 3), ("dp_shard", 2), ("dp_replicate", 2), ("pp", 2))
    assert split.groups("dp_shard", "dp_replicate") == grid.groups("dp")
    assert split.merge(("cp", "dp_shard"), "both").groups("both") == split.groups("cp", "dp_shard")
    with pytest.raises(ValueError, match="is no split of dp"):
        grid.split("dp", ("dp_shard", 3), ("dp_replicate", 2))
    with pytest.raises(ValueError, match="no neighbouring axes"):
        grid.merge(("tp", "dp"), "both")


def test_coordinates_name_the_axes_above_one():
    t = topology(tp=2, cp=2, dp=2, pp=2)
    assert [t.coordinates(rank) for rank in (0, 1, 6, 13)] == [
        "pp0 dp0 cp0 tp0",
        "pp0 dp0 cp0 tp1",
        "pp0 dp1 cp1 tp0",
        "pp1 dp1 cp0 tp1",
    ]
    assert topology(dp=2).coordinates(1) == "dp1"
    assert topology().coordinates(0) == "dp0"
    assert topology(dp=4, ep=2, edp=2).coordinates(3) == "dp3 ep1"
    with pytest.raises(ValueError, match="outside a world of 2"):
        topology(dp=2).coordinates(2)


@pytest.mark.parametrize(
    ("overrides", "replicas", "shards"),
    [
        (["parallel=dp4"], 1, 4),
        (["parallel=dp4zero0"], 4, 1),
        (["parallel=dp4hsdp2"], 2, 2),
        (["parallel=dp1"], 1, 1),
        (["parallel=zero0dp1"], 1, 1),
    ],
)
def test_replicas_and_shards_of_data_parallel_ranks(overrides, replicas, shards):
    spec, _ = resolved("recipe=tiny", *overrides)
    t = Topology.from_spec(spec)
    assert (t.dp_replicate, t.dp_shard, t.dp) == (replicas, shards, replicas * shards)


def test_of_a_resolved_spec():
    spec, _ = resolved("recipe=llama3_8b", "cluster.nodes=2")
    t = Topology.from_spec(spec)
    assert (t.world, t.dp, t.cp, t.microbatches, t.nodes, t.devices_per_node) == (16, 8, 2, 16, 2, 8)


@pytest.mark.parametrize(
    "values",
    [
        {"parallel.dp": 3},
        {"parallel.dp": None},
        {"parallel.dp_replicate": 3},
        {"batch.micro_batch_size": 3},
        {"batch.micro_batch_size": None},
        {"cluster.devices_per_node": "auto"},
        {"parallel.ep": 3},
    ],
)
def test_what_does_not_divide_has_no_topology(values):
    spec, _ = resolved("recipe=llama3_8b")
    with pytest.raises(ValueError, match=r"not the world|does not divide|is not resolved"):
        Topology.from_spec(with_values(spec, values))


@pytest.mark.parametrize(
    ("types", "most_common"),
    [("a2a", "a2a"), (("p2p", "a2a", "a2a"), "a2a"), ((), "p2p"), (("allgather",), "allgather")],
)
def test_most_common_cp_comm_type(types, most_common):
    assert most_common_cp_comm_type(ParallelSpec(cp_comm_type=types)) == most_common
