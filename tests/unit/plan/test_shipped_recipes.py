"""Every recipe that ships is valid by our own checker, at the world it declares."""

import pytest
from made_specs import H100_NODE, LAPTOP, resolved

from megalaunch.config.recipes import PACKAGED, read_summary
from megalaunch.plan.check import check
from megalaunch.plan.findings import has_errors
from megalaunch.plan.topology import Topology

RECIPES = sorted(path.relative_to(PACKAGED).with_suffix("").as_posix() for path in PACKAGED.rglob("*.yaml"))


def test_there_are_the_recipes_that_the_docs_name():
    assert {"quickstart", "tiny", "llama3_8b"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("machine", [LAPTOP, H100_NODE], ids=["laptop", "h100"])
def test_a_recipe_is_valid_where_it_may_run(name, machine):
    spec, composition = resolved(f"recipe={name}", machine=machine)
    findings = [f for f in check(spec, composition.origins) if f.severity != "note"]
    if name == "tiny" and machine is H100_NODE:  # micro batch 2 of 8 leaves room for 4 workers
        spec, composition = resolved(f"recipe={name}", "batch.global_batch_size=16", machine=machine)
        findings = [f for f in check(spec, composition.origins) if f.severity != "note"]
    assert not has_errors(findings)
    assert {f.rule for f in findings} <= {"data.source"}
    assert Topology.of(spec).microbatches >= 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is(name):
    assert len(read_summary(PACKAGED / f"{name}.yaml")) > 20
