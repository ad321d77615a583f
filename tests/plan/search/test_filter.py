"""The filter of a search drops the layouts that the checker refuses, whichever rule refuses them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from made_specs import resolved
from slow_cases import slow_but

from megalaunch.plan.check import check
from megalaunch.plan.rules.registry import RULES, Rule, RuleContext, Violation
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.plan.search import SearchError, search
from megalaunch.plan.search.filter import TOO_BIG, find_layout_rules, first_refusal
from megalaunch.plan.search.space import (
    grids,
    micro_batches,
    pipeline_splits,
    recomputations,
    replicas,
    shardings,
    split_layers,
)

FP8 = "precision.compute_dtype=fp8"
LIBRARY = (FP8, "precision.fp8.implementation=transformer_engine")
CASES = {
    "cuda_graphs": ("recipe=llama3_8b", "train.cuda_graphs=true", "cluster.nodes=2"),
    "fp8_blockwise": ("recipe=qwen3_30b_a3b", FP8, "precision.fp8.recipe=blockwise", "cluster.nodes=2"),
    "fp8_gather": ("recipe=llama3_8b", FP8, "precision.fp8.param_gather=true", "cluster.nodes=2"),
    "fp8_delayed": ("recipe=llama3_8b", FP8, "precision.fp8.recipe=delayed", "cluster.nodes=2"),
    "transformer_engine": ("recipe=llama3_8b", *LIBRARY, "cluster.nodes=2"),
    "flex": ("recipe=llama3_8b", "model.attention_backend=flex", "cluster.nodes=2"),
    "compiled": ("recipe=llama3_8b", "train.compile=true", "cluster.nodes=2"),
    "muon": ("recipe=llama3_8b", "optimizer=muon", "cluster.nodes=2"),
    "outer_steps": ("recipe=llama3_8b", "parallel.outer_steps=10", "parallel.dp_replicate=2", "cluster.nodes=2"),
    "deepseek_v3": ("recipe=deepseek_v3", "cluster.nodes=128"),
    "llama31_405b": ("recipe=llama31_405b", "cluster.nodes=128"),
    "mixtral_8x22b": ("recipe=mixtral_8x22b", "cluster.nodes=32"),
    "gpt3_175b": ("recipe=gpt3_175b", "cluster.nodes=16"),
}
QUICK = ("cuda_graphs", "fp8_blockwise", "deepseek_v3")


def _layouts(spec, count):
    """Return random layouts of the search space, before any filter."""
    source = random.Random(6)
    world = spec.cluster.nodes * spec.cluster.devices_per_node
    every = list(grids(spec, world, spec.cluster.devices_per_node))
    for grid in source.sample(every, min(count, len(every))):
        options = pipeline_splits(spec.model.num_layers, spec.model.mtp.num_layers, grid.parallel.pp)
        if options and grid.parallel.dp:
            split, sharding = source.choice(options), source.choice(shardings(grid))
            node = split_layers(grid, split, sharding, source.choice([*replicas(grid, split, sharding)]))
            size = source.choice([*micro_batches(node), 3])
            recompute = source.choice(recomputations(node))
            yield replace(node, batch=replace(node.batch, micro_batch_size=size), recompute=recompute)
        else:
            yield grid


def _errors(spec):
    with suggestions_disabled():
        return {f.rule: f.message for f in check(spec) if f.severity == "error" and f.rule != TOO_BIG}


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_the_filter_agrees_with_the_checker(case):
    spec, _ = resolved(*CASES[case])
    found = find_layout_rules(spec)
    assert not found.refusals
    agreed = {True: 0, False: 0}
    for layout in _layouts(spec, 60):
        errors, refusal = _errors(layout), first_refusal(layout, found.rules)
        assert (refusal is None) == (not errors), (layout.parallel, errors)
        assert refusal is None or refusal.rule in errors
        agreed[bool(errors)] += 1
    assert min(agreed.values()) > 0


@pytest.fixture
def add_rule(monkeypatch):
    """Return a function that registers a rule with an error on the specs for which a predicate holds."""

    def add(refuses):
        def check(at: RuleContext):
            if refuses(at):
                yield Violation("train.seed", "this engine cannot")

        monkeypatch.setitem(RULES, "test.new", Rule("test.new", "A rule of a new module.", check))

    return add


@pytest.mark.parametrize(
    "refuses",
    [
        lambda at: at.spec.parallel.tp > 1,
        lambda at: at.spec.batch.micro_batch_size != 2,
        lambda at: at.spec.recompute.granularity == "selective",
        lambda at: at.spec.train.seed and at.model_parallel_size > 1,
        lambda at: vars(at.spec.parallel)["cp"] > 1,
        lambda at: replace(at.spec, batch=at.spec.batch).parallel == replace(at.spec.parallel, cp=2),
    ],
    ids=["degree", "micro_batch", "recompute", "derived", "dictionary", "copies"],
)
def test_a_new_rule_is_obeyed_wherever_it_reads_the_layout(refuses, add_rule):
    add_rule(refuses)
    spec, _ = resolved("recipe=llama3_8b")
    result = search(spec)
    assert result.dropped["test.new"]
    assert result.ranked
    assert not [found.spec.parallel for found in result.ranked if refuses(RuleContext(found.spec))]


def test_replicas_that_train_apart_stay_as_they_are():
    spec, _ = resolved("recipe=llama3_8b", "parallel.outer_steps=10", "parallel.dp_replicate=2", "cluster.nodes=2")
    ranked = search(spec).ranked
    assert len(ranked) > 5
    assert {found.spec.parallel.dp_replicate for found in ranked} == {2}


def test_a_rule_that_refuses_every_layout_is_the_answer(add_rule):
    spec, _ = resolved("recipe=llama3_8b")
    add_rule(lambda at: at.spec.train.seed == spec.train.seed)
    with pytest.raises(SearchError, match=r"refuses every layout(.|\n)*\[test.new\] this engine cannot"):
        search(spec)
