"""Two sites joined by a slow link: the time of groups that are in both, outer steps, and what the rules say."""

from __future__ import annotations

import pytest
from made_specs import resolved

from megalaunch.plan.check import check
from megalaunch.plan.cost import step_time
from megalaunch.plan.cost.communication import Interconnect
from megalaunch.plan.memory import predict_memory
from megalaunch.plan.resume_compatibility import incompatible_changes
from megalaunch.schema import with_values

# Two sites of two nodes of eight devices.
WIRES = Interconnect(link=400.0, network=50.0, node=8, site=16, site_link=80.0, node_latency=1.0, site_latency=100.0)
SITES = ("recipe=llama3_8b", "platform=h100", "cluster.nodes=4", "cluster.devices_per_node=8", "cluster.sites=2",
         "cluster.site_bandwidth=12.5", "cluster.site_latency=30")  # fmt: skip
HSDP = (*SITES, "parallel=hsdp2zero3")
H100, OUTER = 0.85, 500  # of a link's bandwidth; steps of a round


def findings(*overrides: str):
    spec, composition = resolved(*overrides)
    return [found for found in check(spec, composition.origins) if found.severity != "note"]


def test_rings_of_a_site_share_its_link():
    assert WIRES.ring(800.0, 8, 1) == 800 * 7 / 8 / 400
    assert WIRES.ring(800.0, 2, 8) == pytest.approx(800 / 2 / 50 + 1)  # within a site
    assert WIRES.ring(800.0, 2, 16) == pytest.approx(800 / 2 / (80 / 16) + 100)  # sixteen rings, one device of each
    assert WIRES.ring(800.0, 32, 1, calls=3) == pytest.approx(800 * 31 / 32 / 80 + 3 * (2 * 100 + 2))
    assert WIRES.ring(800.0, 4, 8) == pytest.approx(800 * 3 / 4 / (2 * 80 / 16) + 2 * 100 + 1)
    assert WIRES.all_to_all(3200.0, 32, 1) == pytest.approx(3200 * 16 / 32 / (80 / 16) + 100)
    assert WIRES.send(800.0, 2, 16) == pytest.approx(800 / (80 / 16) + 100)
    assert WIRES.send(800.0, 2, 8) == pytest.approx(800 / 50 + 1)
    assert not WIRES.is_across_sites(4, 4)
    assert WIRES.is_across_sites(3, 4)


def test_a_round_of_outer_steps_has_one_all_reduce_over_the_slow_link():
    every, apart = resolved(*HSDP)[0], resolved(*HSDP, f"parallel.outer_steps={OUTER}")[0]
    shard = predict_memory(every).parameters / 16
    once = 2 * (4 * shard / 2 / (12.5e9 * H100 / 16) + 0.030 * -(-shard // 2**25))
    assert step_time(apart).communication["outer"].exposed == pytest.approx(once / OUTER)
    assert step_time(every).communication["outer"].exposed == 0
    dp, alone = (step_time(spec).communication["dp"] for spec in (every, apart))
    within = resolved(*HSDP, "cluster.sites=1", "cluster.site_bandwidth=null", "cluster.site_latency=0")[0]
    assert dp.exposed + dp.hidden > once
    assert alone.exposed + alone.hidden < step_time(within).communication["dp"].exposed + dp.hidden
    # What is left of the link in every step: two all-reduces of a few numbers.
    fast = resolved(*HSDP, f"parallel.outer_steps={OUTER}", "cluster.site_latency=0")[0]
    assert alone.exposed - step_time(fast).communication["dp"].exposed == pytest.approx(2 * 2 * 0.030)
    assert step_time(apart).total < step_time(every).total


def test_latency_between_nodes_counts_with_every_unit():
    spec = resolved("recipe=llama3_8b", "platform=h100", "cluster.nodes=4", "cluster.devices_per_node=8",
                    "parallel=zero3")[0]  # fmt: skip
    slower = with_values(spec, {"cluster.node_latency": 20.0})
    before, after = (step_time(each).communication["dp"] for each in (spec, slower))
    assert after.exposed + after.hidden > before.exposed + before.hidden + 4 * 20e-6 * 30


def test_outer_weights_and_momentum_take_eight_bytes_of_a_parameter():
    spec = resolved(*HSDP)[0]
    plain, outer, averaged = (
        predict_memory(with_values(spec, {"parallel.outer_steps": steps, "parallel.outer_momentum": momentum}))
        for steps, momentum in ((0, 0.9), (OUTER, 0.9), (OUTER, 0.0))
    )
    shard = plain.parameters / 16
    assert outer.optimizer - plain.optimizer == pytest.approx(8 * shard)
    assert averaged.optimizer - plain.optimizer == pytest.approx(4 * shard)


@pytest.mark.parametrize(
    ("overrides", "rule", "message", "fix"),
    [
        (
            "parallel=zero3 parallel.outer_steps=10",
            "parallel.outer_steps_need_replicas",
            "outer_steps 10 has no replicas to average: dp is 32, dp_replicate 1",
            "parallel.dp_replicate=2",
        ),
        (
            "parallel=hsdp2zero3 parallel.outer_steps=10 precision.main_params_dtype=bf16",
            "parallel.outer_steps_with",
            "outer_steps 10 does not work with precision.main_params_dtype=bf16",
            "precision.main_params_dtype=fp32",
        ),
        (
            "parallel=hsdp2zero3 parallel.outer_steps=10 optimizer.optimizer_offload_fraction=0.5",
            "parallel.outer_steps_with",
            "outer_steps 10 does not work with optimizer.optimizer_offload_fraction=0.5",
            "optimizer.optimizer_offload_fraction=0",
        ),
        (
            "parallel=hsdp2zero3 parallel.outer_steps=10 model.mtp.num_layers=1",
            "parallel.outer_steps_with",
            "outer_steps 10 does not work with model.mtp.num_layers=1",
            "model.mtp.num_layers=0",
        ),
        (
            "parallel=hsdp2zero3 parallel.outer_steps=10 precision=fp8",
            "parallel.outer_steps_with",
            "outer_steps 10 does not work with precision.compute_dtype=fp8",
            "precision.compute_dtype=bf16",
        ),
        (
            "parallel=hsdp2zero3 parallel.outer_steps=30 train.validation_interval=100",
            "parallel.outer_steps_by_validation",
            "train.validation_interval=100 is no multiple of outer_steps 30: the replicas' weights differ there",
            "train.validation_interval=90",
        ),
        (
            "parallel=zero3",
            "cluster.replicas_by_sites",
            "data-parallel shards are in several of the 2 sites: their collectives cross the link between sites with "
            "all parameters in every step",
            "parallel.dp_replicate=2",
        ),
        (
            "parallel=hsdp2pp2 recompute=full",
            "cluster.replicas_by_sites",
            "pp ranks are in several of the 2 sites: their collectives cross the link between sites in every "
            "microbatch",
            "parallel.pp=1",
        ),
        (
            "parallel=hsdp2zero3 cluster.sites=3",
            "cluster.nodes_by_sites",
            "4 nodes are not divisible by 3 sites",
            "cluster.sites=2",
        ),
    ],
)
def test_what_the_rules_say(overrides, rule, message, fix):
    (found,) = [found for found in findings(*SITES, *overrides.split()) if found.rule == rule]
    assert found.message == message
    assert fix in found.fixes


def test_experts_are_refused():
    (found,) = [
        found
        for found in findings("recipe=mixtral_8x7b", "parallel=ep8hsdp2", "parallel.outer_steps=10", "cluster.nodes=8")
        if found.rule == "parallel.outer_steps_with"
    ]
    assert found.message == "outer_steps 10 does not work with model.moe.num_experts=8"
    assert found.fixes == ("parallel.outer_steps=0",)


def test_hsdp_over_two_sites_is_valid_with_and_without_outer_steps():
    assert findings(*HSDP) == []
    assert findings(*HSDP, "parallel.outer_steps=50") == []


def test_a_run_keeps_its_outer_steps():
    spec = resolved(*HSDP, "parallel.outer_steps=50")[0]
    (found,) = incompatible_changes(with_values(spec, {"parallel.outer_steps": 0}), spec)
    assert found.path == "parallel.outer_steps"
    assert not incompatible_changes(with_values(spec, {"parallel.dp_replicate": 4}), spec)
