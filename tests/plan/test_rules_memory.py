"""The rule memory.fits: its severities, its numbers, and that its fixes work."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from made_specs import resolved
from published_llmq_runs import ONE_DEVICE
from published_runs import BRIDGE, DGXC, MEMORY_7B, MEMORY_MOE, MEMORY_SFT, OTHERS

from megalaunch.plan.check import check
from megalaunch.plan.memory import predict_memory
from megalaunch.platform.chips import CHIPS

BIG = ("recipe=llama3_8b", "parallel=tp1", "batch.micro_batch_size=4")


def _found(spec, origins=None):
    return [finding for finding in check(spec, origins) if finding.rule == "memory.fits"]


def test_too_big_is_an_error_with_the_parts_and_fixes_that_fit():
    spec, composition = resolved(*BIG)
    (finding,) = _found(spec, composition.origins)
    assert finding.severity == "error"
    memory = predict_memory(spec)
    assert finding.numbers["bytes"] == round(memory.total) > finding.numbers["device_bytes"] == 81559 * 2**20
    assert f"needs {memory.total / 1e9:.1f} GB of the 85.5 GB of h100: weights 20.1" in finding.message
    assert len(finding.fixes) == 3
    for fix in finding.fixes:
        fixed, again = resolved(*BIG, *shlex.split(fix))
        assert not _found(fixed, again.origins), fix


def test_what_a_fix_makes_idle_is_taken_back_with_it():
    spec, composition = resolved("recipe=llama31_405b", "parallel=tp8", "cluster.nodes=128")
    (finding,) = _found(spec, composition.origins)
    assert any("parallel.sequence_parallel=true" in fix for fix in finding.fixes)
    full = [fix for fix in finding.fixes if "recompute.granularity=full" in fix]
    assert all("recompute.modules=[attention]" in fix for fix in full)


def test_the_shipped_recipe_fits_and_says_nothing():
    spec, composition = resolved("recipe=llama3_8b")
    assert not _found(spec, composition.origins)


def test_almost_full_is_a_warning(monkeypatch):
    spec, composition = resolved("recipe=llama3_8b")
    snug = replace(CHIPS["h100"], memory_bytes=int(predict_memory(spec).total / 0.97))
    monkeypatch.setattr("megalaunch.plan.rules.registry.CHIPS", {"h100": snug})
    (finding,) = _found(spec, composition.origins)
    assert finding.severity == "warning"
    assert "leaves little for libraries" in finding.message
    monkeypatch.setattr(
        "megalaunch.plan.rules.registry.CHIPS",
        {"h100": replace(snug, memory_bytes=int(predict_memory(spec).total / 0.94))},
    )
    assert not _found(spec, composition.origins)


def test_a_processor_is_never_too_small():
    spec, composition = resolved(*BIG, "platform=cpu", "cluster.devices_per_node=8")
    assert not _found(spec, composition.origins)


@pytest.mark.parametrize(
    "run", [*DGXC, *BRIDGE, *OTHERS, *ONE_DEVICE, *MEMORY_7B, *MEMORY_SFT, *MEMORY_MOE], ids=lambda run: run.name
)
def test_no_real_run_is_refused_as_not_fitting(run):
    assert not [finding for finding in _found(run.spec) if finding.severity == "error"]
