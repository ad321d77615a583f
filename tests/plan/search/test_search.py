"""The search returns layouts that are valid and fit, drops the rest, and ranks real layouts high."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
from made_specs import LAPTOP, resolved
from published_runs import DGXC
from slow_cases import slow_but

from megalaunch.cli.plan.search import layout_text, search_json, search_text
from megalaunch.config.compose import compose
from megalaunch.plan.check import check
from megalaunch.plan.cost import MEGATRON, step_time
from megalaunch.plan.memory import predict_memory
from megalaunch.plan.resolve import resolve
from megalaunch.plan.search import SearchError, SearchResult, differences, search
from megalaunch.plan.search.search import _least_that_fits
from megalaunch.plan.search.space import pipeline_splits, recomputations
from megalaunch.platform.chips import CHIPS

# facts 1a: NVIDIA's best published bf16 layouts; gradients were summed in bf16.
BF16 = ("precision.grad_reduce_dtype=bf16", "precision.grad_dtype=bf16")
VPP = (*BF16, "parallel.overlap_p2p_comm=true")  # as in published_runs: all of them overlap it
MEASURED = {
    "8b": ("recipe=llama3_8b", "parallel=cp2", "batch.global_batch_size=128", *BF16),
    "70b": ("recipe=llama3_70b", "parallel=tp4pp4cp2vpp5sp", "cluster.nodes=8", "batch.global_batch_size=128", *VPP),
    "405b": (
        "recipe=llama31_405b",
        "parallel=tp8pp8cp2vpp8sp",
        "parallel.account_for_embedding_in_pipeline_split=true",
        "parallel.account_for_loss_in_pipeline_split=true",
        "cluster.nodes=64",
        "batch.global_batch_size=256",
        *VPP,
    ),
    "175b": ("recipe=gpt3_175b", "parallel=tp4pp8vpp12sp", "cluster.nodes=16", "batch.global_batch_size=256", *VPP),
}
TABLE = {"llama3_8b": 1, "llama3_70b": 8, "gpt3_175b": 16, "mixtral_8x7b": 8}
"""Recipes, and the nodes of their published runs."""


@cache
def found_for(recipe: str) -> SearchResult:
    """Of a recipe as it is; several tests look at the same search."""
    spec, _ = resolved(f"recipe={recipe}", f"cluster.nodes={TABLE[recipe]}")
    return search(spec)


@pytest.mark.parametrize("name", slow_but(MEASURED, "8b"))
def test_measured_layouts_rank_in_the_top_tenth(name):
    spec, _ = resolved(*MEASURED[name])
    result = search(spec, stack=MEGATRON)  # on which they were measured
    assert result.own is not None, result.own_fault
    place = result.place(result.own)
    assert place <= len(result.ranked) / 10, f"{place} of {len(result.ranked)} timed, {result.valid} valid"


def test_the_search_reports_progress():
    told: list[tuple[int, int]] = []
    spec, _ = resolved("recipe=llama3_8b")
    search(spec, report=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(1, told[0][1] + 1))
    assert len(told) > 5


@pytest.mark.parametrize("run", slow_but([DGXC[3], DGXC[4], DGXC[6]], DGXC[3]), ids=lambda run: run.name)
def test_other_measured_layouts_rank_in_the_top_tenth_too(run):
    result = search(run.spec, stack=MEGATRON)
    assert result.own is not None, result.own_fault
    place = result.place(result.own)
    assert place <= result.valid / 10, f"{place} of {len(result.ranked)} timed, {result.valid} valid"


@pytest.mark.timed
def test_the_largest_search_takes_seconds():
    spec, _ = resolved("recipe=llama31_405b", "cluster.nodes=128")
    started = time.process_time()  # the machine may be busy with other tests
    result = search(spec)
    assert time.process_time() - started < 10
    assert result.valid > 1000
    assert result.num_considered == result.valid + result.dropped.total()
    assert {"memory.fits", "parallel.world", "batch.global_by_dp"} <= set(result.dropped)


@pytest.mark.parametrize("recipe", slow_but(TABLE, "llama3_70b"))
def test_what_is_found_is_valid_and_its_overrides_give_it(recipe):
    result = found_for(recipe)
    best = result.ranked[:5]
    assert len(best) == 5
    chip = CHIPS[best[0].spec.platform.chip]
    for found in best:
        assert not [f for f in check(found.spec) if f.severity == "error"]
        assert predict_memory(found.spec).total <= chip.memory_bytes
        again, _ = resolved(f"recipe={recipe}", *layout_text(found.spec))
        assert again == found.spec
    speeds = [found.speed for found in result.ranked]
    assert speeds == sorted(speeds, reverse=True)


def test_the_least_recomputation_that_fits_is_the_fastest_of_its_ladder():
    spec, _ = resolved("recipe=llama3_70b", "cluster.nodes=8")
    grid = replace(spec, parallel=replace(spec.parallel, tp=4, pp=4, cp=1, dp=4))
    steps = [replace(grid, recompute=recompute) for recompute in recomputations(grid)]
    sizes = [predict_memory(step).total for step in steps]
    assert sizes == sorted(sizes, reverse=True)
    for place, size in enumerate(sizes):
        assert _least_that_fits(steps, size)[0] == place
    assert _least_that_fits(steps, min(sizes) - 1) is None
    times = [step_time(step).total for step in steps]
    assert times == sorted(times)


@pytest.mark.parametrize(("layers", "mtp"), [(80, 0), (126, 0), (61, 1), (61, 0), (35, 2), (3, 0)])
def test_every_division_holds_every_layer_once(layers, mtp):
    for pp in (n for n in (2, 3, 4, 8, 16) if n <= layers):
        for division in pipeline_splits(layers, mtp, pp):
            if division.layout is not None:
                assert division.layout.count("t") == layers
                stages = division.layout.split("|")
                assert stages[-1].endswith("m" * mtp + "L")
                assert len(stages) % pp == 0
                assert max(map(len, stages)) - min(map(len, stages)) <= 1
            elif division.first is None and division.last is None:
                assert (layers + division.embedding + division.head) % (pp * (division.vpp or 1)) == 0
            else:
                ends = (division.first or 0) + (division.last or 0)
                middle = pp - (division.first is not None) - (division.last is not None)
                assert (layers - ends) % middle == 0


def test_other_numbers_of_devices_are_searched():
    spec, _ = resolved("recipe=llama3_8b")
    result = search(spec, 64)
    assert {found.time.world for found in result.ranked} == {64}
    assert search(spec, 4).ranked[0].spec.cluster.devices_per_node == 4
    with pytest.raises(SearchError, match="12 devices are not divisible into nodes of 8"):
        search(spec, 12)
    laptop, _ = resolved("recipe=llama3_8b", "platform=cpu", "cluster.devices_per_node=8")
    with pytest.raises(SearchError, match="platform=h100"):
        search(laptop)


def test_the_reasons_add_up():
    result = found_for("llama3_70b")
    best, own = result.ranked[0], result.own
    found = differences(best.time, own.time)
    assert sum(difference.seconds for difference in found) == pytest.approx(best.time.total - own.time.total)
    assert abs(found[0].seconds) >= abs(found[-1].seconds)


def test_what_is_printed_names_the_place_of_the_runs_own_layout():
    result = found_for("llama3_70b")
    best = result.ranked[:3]
    text = search_text(result, best)
    assert f"this run's layout is number {result.place(result.own)} of {result.valid:,}" in text
    assert "number 1 is" in text
    (line,) = [line for line in text.splitlines() if line.startswith("  number 1 is")]
    gains, _, price = line.partition("; but ")
    assert " less " in gains
    assert " more " not in gains
    assert " less " not in price
    assert "dropped: memory.fits" in text
    assert '"own_fault": ""' in search_json(result, best)
    odd, _ = resolved("recipe=llama3_70b", "parallel=tp3")
    assert "it violates the rule parallel." in search_text(search(odd), [])


def test_a_run_whose_layout_is_wrong_is_still_searched():
    composition = compose(["recipe=llama3_8b", "parallel=tp3pp7", "cluster.nodes=1"])
    spec = resolve(composition.spec, LAPTOP, "llama3_8b").spec
    assert search(spec).ranked
