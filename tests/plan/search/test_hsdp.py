"""HSDP in a search: replicas of whole nodes that hold all shards, tried where they can be faster."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
from made_specs import resolved
from slow_cases import slow_but

from megalaunch.cli.plan.search import layout_text, search_json, search_text
from megalaunch.plan.check import check
from megalaunch.plan.memory import Memory, predict_memory
from megalaunch.plan.prediction import predict
from megalaunch.plan.search import SearchResult, search
from megalaunch.plan.search.space import LayerSplit, grids, replicas
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ParallelSpec

RUN = ("model=qwen3_14b", "platform=h200", "precision=bf16", "batch.sequence_length=4096", "train.steps=10")
BATCH = "batch.global_batch_size=128"
NODES = ("cluster.nodes=4", "cluster.devices_per_node=8")
SLOW = "cluster.node_bandwidth=6.25"  # GB/s of a GPU: 400 Gb/s of a node
EXPERTS = ("recipe=mixtral_8x7b", "cluster.nodes=4")


@cache
def found_for(*overrides: str) -> SearchResult:
    return search(resolved(*(overrides or (*RUN, BATCH, *NODES, SLOW)))[0])


def numbers(tp: int, pp: int, cp: int, sharding: str, *overrides: str, vpp: int | None = None) -> list[int]:
    """Return the numbers of replicas that a search tries for degrees, on four nodes of eight if not overridden."""
    spec = resolved(*RUN, BATCH, *NODES, *overrides)[0]
    world = spec.cluster.nodes * spec.cluster.devices_per_node
    for grid in grids(spec, world, spec.cluster.devices_per_node):
        if (grid.parallel.tp, grid.parallel.pp, grid.parallel.cp) == (tp, pp, cp):
            return list(replicas(grid, LayerSplit(vpp), sharding))
    raise AssertionError("no such grid")


def test_where_the_network_is_slow_replicas_are_fastest():
    ranked = found_for().ranked
    one = next(found for found in ranked if found.spec.parallel.dp_replicate == 1)
    assert ranked[0].spec.parallel.dp_replicate > 1
    assert ranked[0].speed > 1.005 * one.speed
    fast = search(resolved(*RUN, BATCH, *NODES, "cluster.node_bandwidth=100")[0]).ranked
    assert fast[0].spec.parallel.dp_replicate == 1


def test_a_replica_is_whole_nodes_with_several_shards():
    assert numbers(1, 1, 1, "optim_grads_params") == [1, 2, 4]
    assert numbers(8, 1, 1, "optim_grads_params") == [1, 2]  # a node would hold one shard
    assert numbers(4, 1, 2, "optim_grads_params") == [1, 2, 4]  # cp ranks share the shards
    assert numbers(1, 4, 1, "optim", vpp=10) == [1]  # all shards of a stage are on one node
    assert numbers(1, 1, 1, "optim_grads_params", "cluster.devices_per_node=6", BATCH) == [1, 2, 4]
    assert numbers(1, 1, 1, "optim_grads_params", "cluster.nodes=6", "cluster.sites=2") == [1, 2, 3, 6]  # 3: a site
    assert numbers(1, 1, 1, "optim_grads_params", "cluster.nodes=6") == [1, 3, 6]
    assert numbers(1, 1, 1, "optim_grads_params", "cluster.nodes=1") == [1]
    assert len(numbers(1, 1, 1, "optim_grads_params", "cluster.nodes=1024")) == 11


def test_replicas_of_several_nodes_are_tried_only_where_a_step_communicates_repeatedly():
    eight = "cluster.nodes=8"
    assert numbers(1, 1, 1, "optim") == [1, 4]
    assert numbers(1, 1, 1, "optim_grads") == [1, 2, 4]
    assert numbers(1, 2, 1, "optim", eight, vpp=3) == [1, 4]
    assert numbers(1, 2, 1, "optim", eight, vpp=4) == [1, 2, 4]  # torch frees all but three of a rank's stages


@pytest.mark.parametrize("layout", slow_but(["zero1", "tp2sp", "cp2", "pp2vpp2", "tp8sp"], "zero1", "pp2vpp2"))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_larger_ones_would_not_be_faster_elsewhere(layout, dtype):
    """Two replicas of four nodes, of two for each stage of a pipeline."""
    given = (*RUN, BATCH, "cluster.nodes=8", "cluster.devices_per_node=8", SLOW, f"precision.grad_reduce_dtype={dtype}")
    one, two = (predict(resolved(*given, f"parallel={layout}{hsdp}")[0]) for hsdp in ("", "hsdp2"))
    assert two.time.total >= one.time.total
    assert two.memory.total > one.memory.total


@pytest.mark.parametrize("overrides", [(), pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["dense", "experts"])
def test_what_is_printed_is_valid_and_has_the_same_figures(overrides):
    result = found_for(*overrides)
    given = [word for word in overrides or (*RUN, BATCH, SLOW) if not word.startswith("cluster.nodes")]
    layouts = [found for found in result.ranked if found.spec.parallel.dp_replicate > 1][:3]
    assert len(layouts) == 3
    for found in layouts:
        words = layout_text(found.spec)
        name = f"hsdp{found.spec.parallel.dp_replicate}"
        assert words[0].startswith("parallel=")
        assert name in words[0]
        again, _ = resolved(*given, *words)
        assert again == found.spec
        assert not [f for f in check(again) if f.severity == "error"]
        planned = predict(again)
        assert planned.time == found.time
        assert planned.memory.total == found.memory.total
        assert f" {name} " in search_text(result, [found]).splitlines()[1]
        assert name in search_json(result, [found])


def test_of_one_microbatch_gradients_are_reduced_once_whatever_the_sharding():
    """So that one of two equal layouts is searched."""
    given = (*RUN, BATCH, *NODES, "batch.micro_batch_size=4")
    first, second = (predict(resolved(*given, f"parallel={name}hsdp2")[0]) for name in ("zero1", "zero2"))
    assert first.topology.microbatches == 1
    assert first.time == second.time
    assert first.memory.total == second.memory.total
    of_two = [f for f in found_for().ranked if f.spec.parallel.data_sharding == "optim_grads"]
    assert of_two
    assert min(Topology.from_spec(f.spec).microbatches for f in of_two) > 1


def test_equal_layouts_count_once():
    """The run's own layout is one of those that are searched, whether it has replicas or not."""
    result = found_for()
    texts = [tuple(layout_text(found.spec)) for found in result.ranked]
    assert len(texts) == len(set(texts))
    own = resolved(*RUN, BATCH, SLOW, *layout_text(result.ranked[0].spec))[0]
    again = search(own)
    assert again.own == again.ranked[0]
    assert (len(again.ranked), again.num_considered) == (len(result.ranked), result.num_considered)


def test_more_replicas_are_tried_only_where_fewer_fit(monkeypatch):
    tried: dict[ParallelSpec, set[int]] = defaultdict(set)

    def but_replicas(spec: RunSpec) -> ParallelSpec:
        return replace(spec.parallel, dp_replicate=1)

    def recorded(spec: RunSpec) -> Memory:
        tried[but_replicas(spec)].add(spec.parallel.dp_replicate)
        return predict_memory(spec)

    monkeypatch.setattr(import_module("megalaunch.plan.search.search"), "predict_memory", recorded)
    given = ("model=llama3_70b", *RUN[1:], BATCH, "cluster.nodes=8", "cluster.devices_per_node=8")
    fit: dict[ParallelSpec, set[int]] = defaultdict(set)
    for found in search(resolved(*given)[0]).ranked:
        fit[but_replicas(found.spec)].add(found.spec.parallel.dp_replicate)
    for layout, replicas_of_it in tried.items():
        assert set(sorted(replicas_of_it)[:-1]) <= fit[layout]
    assert any(fit[layout] and replicas_of_it - fit[layout] for layout, replicas_of_it in tried.items())


def test_more_replicas_need_more_memory():
    """So a search leaves them out where fewer do not fit."""
    for layout in ("zero2", "zero3", "pp2vpp10", "tp2spzero3", "cp2zero3"):
        specs = [resolved(*RUN, BATCH, *NODES, f"parallel={layout}{h}")[0] for h in ("", "hsdp2", "hsdp4")]
        sizes = [predict_memory(spec).total for spec in specs[: 2 if "pp" in layout else 3]]
        assert sizes == sorted(set(sizes))
