"""Every recipe that ships is valid by our own checker, on the fewest nodes that hold it and on those published."""

import re
from dataclasses import replace
from functools import cache

import pytest
from made_specs import H100_NODE, LAPTOP
from slow_cases import slow_but

from megalaunch.config.compose import Composer, compose
from megalaunch.config.groups import option_names
from megalaunch.config.recipes import PACKAGED, read_summary
from megalaunch.plan.check import check
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.resolve import resolve
from megalaunch.plan.stages import build_stages
from megalaunch.plan.topology import Topology
from megalaunch.platform.allocation import Allocation
from megalaunch.schema.model import Family

RECIPES = sorted(path.relative_to(PACKAGED).with_suffix("").as_posix() for path in PACKAGED.rglob("*.yaml"))
CPU_SIZED = [name for name in RECIPES if name.endswith("tiny") or name == "quickstart"]
QUICK = (*RECIPES[::4], "quickstart", "mixtral_tiny")
TOYS = [name for name in RECIPES if name.endswith("tiny") or name == "gpt2_124m"]
SOME = slow_but(RECIPES, *QUICK)
COMPOSER = Composer()


@cache
def composed(*overrides):
    return COMPOSER.compose(overrides)


def spec_on(machine, *overrides):
    composition = composed(*overrides)
    return resolve(composition.spec, machine, composition.choices["recipe"]).spec, composition


TABLE = {  # recipe: devices, tp, pp, cp, ep, sequence
    "llama3_8b": (8, 1, 1, 2, 1, 8192),
    "llama3_70b": (64, 4, 4, 2, 1, 8192),
    "llama31_405b": (1024, 8, 8, 2, 1, 8192),
    "gpt3_175b": (128, 4, 8, 1, 1, 2048),
    "mixtral_8x7b": (64, 1, 4, 1, 8, 4096),
    "mixtral_8x22b": (256, 4, 4, 8, 8, 65536),
    "deepseek_v3": (1024, 2, 16, 1, 64, 4096),
}
"""The layouts that published measurements used."""


@pytest.mark.parametrize(("name", "shape"), slow_but(TABLE.items(), *[*TABLE.items()][::3]))
def test_the_layouts_of_the_table(name, shape):
    spec, _ = spec_on(LAPTOP, f"recipe={name}", f"cluster.nodes={shape[0] // 8}")
    p, c = spec.parallel, spec.cluster
    assert (c.nodes * c.devices_per_node, p.tp, p.pp, p.cp, p.ep, spec.batch.sequence_length) == shape
    assert bool(p.sequence_parallel) == (p.tp > 1)


@pytest.mark.parametrize("name", SOME)
def test_a_recipe_does_not_pin_its_cluster(name):
    origins = composed(f"recipe={name}").origins
    assert {origins[key].kind for key in origins if key.startswith("cluster.")} == {"default"}


PUBLISHED = {name: re.search(r"published on (\d+) nodes", read_summary(PACKAGED / f"{name}.yaml")) for name in RECIPES}


@pytest.mark.parametrize(("name", "nodes"), [(name, found[1]) for name, found in PUBLISHED.items() if found])
def test_a_recipe_is_valid_on_the_nodes_of_its_publication(name, nodes):
    assert errors(LAPTOP, f"recipe={name}", f"cluster.nodes={nodes}") == []


def test_gpt3_runs_on_512_devices_too():
    assert errors(LAPTOP, "recipe=gpt3_175b", "cluster.nodes=64") == []


def test_a_layout_that_does_not_fit_llama3_70b_says_all_at_once():
    spec, composition = spec_on(LAPTOP, "recipe=llama3_70b", "parallel=tp3pp7", "cluster.nodes=8")
    found = [f for f in check(spec, composition.origins) if f.severity == "error"]
    ids = ("world", "layers_by_pp", "ffn_by_tp", "groups_by_tp", "heads_by_tp")
    assert {f.rule for f in found} == {f"parallel.{name}" for name in ids}
    assert len(found) == 5
    assert all(f.fixes for f in found)


def test_stages_of_the_recipes_that_do_not_divide_evenly():
    large = build_stages(spec_on(LAPTOP, "recipe=llama31_405b")[0])
    assert [len(stage.layers) for stage in large] == [1, *[2] * 62, 1]
    deep = build_stages(spec_on(LAPTOP, "recipe=deepseek_v3")[0])
    assert [len(stage.layers) for stage in deep] == [*[4] * 15, 1]
    assert (deep[-1].mtp, deep[-1].head, deep[0].embedding) == ((0,), True, True)


def errors(machine, *overrides):
    spec, composition = spec_on(machine, *overrides)
    return [f"{f.rule}: {f.message}" for f in check(spec, composition.origins) if f.severity == "error"]


def words_of(name, machine):
    """A toy's micro batch of 2 of 8 leaves room for 4 workers; an H100 node has 8."""
    larger = name.endswith("tiny") and machine is H100_NODE
    return (f"recipe={name}", *(("batch.global_batch_size=16",) if larger else ()))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("machine", [LAPTOP, H100_NODE], ids=["laptop", "h100"])
def test_a_recipe_is_valid_where_it_may_run(name, machine):
    overrides = words_of(name, machine)
    if machine is H100_NODE:  # in an allocation of as many nodes as the recipe needs
        nodes = int(spec_on(LAPTOP, f"recipe={name}")[0].cluster.nodes)
        machine = replace(H100_NODE, allocation=Allocation("Slurm job", nodes, 8))
    assert errors(machine, *overrides) == []
    assert Topology.from_spec(spec_on(machine, *overrides)[0]).microbatches >= 1


@pytest.mark.parametrize("name", slow_but(RECIPES, "gpt_oss_120b", *TABLE))
def test_a_summary_names_the_devices_that_the_recipe_assumes(name):
    """ "on N or more H100, published on M", or "published on K nodes" if these are what the recipe assumes."""
    summary = read_summary(PACKAGED / f"{name}.yaml")
    cluster = spec_on(LAPTOP, f"recipe={name}")[0].cluster
    devices = cluster.nodes * cluster.devices_per_node
    if fewest := re.search(r"on (\d+) or more H100, published on (\d+)\.", summary):
        assert devices == int(fewest[1]) < int(fewest[2])
    elif nodes := re.search(r"published on (\d+) nodes", summary):
        assert devices == 8 * int(nodes[1])


@pytest.mark.parametrize("name", SOME)
def test_a_recipe_warns_of_nothing(name):
    spec, composition = spec_on(LAPTOP, f"recipe={name}")
    warnings = [f for f in check(spec, composition.origins) if f.severity == "warning"]
    assert [f"{f.rule}: {f.message}" for f in warnings] == []


A_FEW = ("quickstart", "gpt2_124m", "llama3_8b", "deepseek_v3", "mixtral_tiny")
FOLLOWING = [
    *((f"train.steps={steps}",) for steps in (1, 2, 3, 10)),
    ("optimizer.lr=1e-9",),
    ("optimizer.lr=0.001", "train.steps=7", "schedule=wsd"),
    ("train.steps=5", "schedule=linear"),
    ("train.steps=5", "schedule=constant"),
]


@pytest.mark.parametrize("name", slow_but(RECIPES, "quickstart", "mixtral_tiny", slow=A_FEW, one_in=6))
def test_no_value_of_a_recipe_stops_a_shorter_run_or_another_rate(name):
    for overrides in FOLLOWING:
        assert errors(LAPTOP, f"recipe={name}", *overrides) == [], overrides


@pytest.mark.parametrize("name", slow_but(TOYS, "tiny", "mixtral_tiny"))
@pytest.mark.parametrize("dp", slow_but([1, 2, 4, 8], 8, every=[4]))
def test_the_micro_batch_of_a_recipe_follows_the_layout(name, dp):
    assert errors(LAPTOP, f"recipe={name}", f"parallel=dp{dp}") == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is(name):
    assert 20 < len(read_summary(PACKAGED / f"{name}.yaml")) <= 100


@pytest.mark.parametrize("name", slow_but(RECIPES, "quickstart", "mixtral_tiny", slow=A_FEW, one_in=4))
def test_a_composer_of_many_runs_composes_each_as_alone(name):
    among_others, alone = COMPOSER.compose([f"recipe={name}"]), compose([f"recipe={name}"])
    assert (among_others.spec, among_others.choices) == (alone.spec, alone.choices)


@pytest.mark.slow  # it composes them all
def test_every_family_has_a_recipe_and_a_cpu_sized_twin():
    families = {name: spec_on(LAPTOP, f"recipe={name}")[0].model.family for name in RECIPES}
    twins = {family for name, family in families.items() if name.endswith("_tiny")}
    full = {family for name, family in families.items() if name not in CPU_SIZED}
    assert twins == full == set(Family.__args__)


@pytest.mark.parametrize("name", slow_but(CPU_SIZED, "quickstart", "mixtral_tiny"))
def test_a_cpu_sized_recipe_is_small(name):
    spec, _ = spec_on(LAPTOP, f"recipe={name}", "data.corpus=x")
    assert count_parameters(spec.model).total <= (6_000_000 if name == "quickstart" else 200_000)
    assert errors(LAPTOP, f"recipe={name}", "data.corpus=x") == []
    assert spec.batch.sequence_length * spec.batch.global_batch_size <= 2048


@pytest.mark.slow
def test_every_layout_file_belongs_to_a_recipe():
    used = {spec_on(LAPTOP, f"recipe={name}")[1].choices["parallel"] for name in RECIPES}
    assert set(option_names("parallel")) <= used
