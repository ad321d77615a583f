"""Random specs: the checker never raises, fixes that it shows are right, and what it calls valid divides."""

import shlex
import types
from dataclasses import replace
from typing import Literal, Union, get_args, get_origin

from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_specs import H100_NODE, LAPTOP, composed

from megalaunch.config.compose import Origin
from megalaunch.config.keys import schema_keys
from megalaunch.config.overrides import parse_overrides
from megalaunch.plan.check import check
from megalaunch.plan.findings import has_errors
from megalaunch.plan.report import findings_text
from megalaunch.plan.resolve import resolve
from megalaunch.plan.stages import MAX_LAYERS, build_stages
from megalaunch.plan.summary import derived_values
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec, SpecError, SpecProblem, with_values
from megalaunch.schema.paths import value_at

RECIPES = ("tiny", "llama3_8b", "mixtral_8x7b", "deepseek_v3")
DEGREES = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5, 8, 16, 64, 10**9])
LIKELY = {
    "parallel.tp": DEGREES,
    "parallel.pp": DEGREES,
    "parallel.cp": DEGREES,
    "parallel.dp": st.sampled_from([None, None, 1, 2, 3, 8]),
    "parallel.pipeline_layout": st.sampled_from(
        [None, "", "EttL", "Et|tL", "E(t|)*61mL", "(((", "tEL*9", "Et*3|(tt|)*29m|L"]
    ),
    "parallel.hierarchical_context_parallel_sizes": st.sampled_from([(), (2,), (2, 2), (2, 4), (1, 1, 10**6)]),
    "batch.global_batch_size": st.integers(1, 10**9) | st.sampled_from([1, 8, 12, 128]),
    "batch.sequence_length": st.sampled_from([1, 7, 32, 48, 8192, 10**9]),
    "batch.rampup_batch_size": st.sampled_from([None, "", "0:4 1K:8", "0:0", "1:1", "0:512 2B:1024"]),
    "cluster.devices_per_node": st.sampled_from(["auto", 1, 2, 7, 8]),
    "cluster.nodes": st.sampled_from([1, 1, 2, 3, 128]),
    "platform.chip": st.sampled_from(["auto", "cpu", "h100", "h1oo", ""]),
    "data.corpus": st.sampled_from([None, "x"]),
    "data.train_prefix": st.sampled_from([None, "y", "\0", "~nobody_/x", "z" * 5000]),
    "data.split": st.sampled_from([None, "", "969,30,1", "a,b", "1,-1", "0,0,0"]),
    "run.name": st.sampled_from([None, "..", "a b", "", "é" * 300]),
}
TEXTS = st.sampled_from(["", "x", "a,b", "2 x", "\0", "0"])
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 16, 32, 64, 126, 4096, 10**9]


def _base(recipe):
    """The spec of a recipe before it is resolved."""
    return composed(f"recipe={recipe}", "data.corpus=x").spec


def values_of(annotation, limits):
    """Values of a type of the schema, within the limits of its key."""
    if annotation is type(None):
        return st.none()
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of([values_of(option, limits) for option in get_args(annotation)])
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        return st.lists(values_of(get_args(annotation)[0], limits), max_size=4).map(tuple)
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        return TEXTS
    low, high = limits["minimum"], limits["maximum"]
    numbers = [*NUMBERS, *([0.0, 1e-9, 0.5, 0.999, 1e100] if annotation is float else [])]
    return st.sampled_from([n for n in numbers if (low is None or n >= low) and (high is None or n <= high)])


VALUES = {path: LIKELY.get(path, values_of(key.annotation, key.field.metadata)) for path, key in schema_keys().items()}
LAYOUT = [path for path in VALUES if path.startswith(("parallel.", "cluster.", "batch."))]
MORE_MACHINES = ("launcher.multi_node", "cluster.nodes")  # says how to start the nodes that a fix adds
SPECS = st.tuples(
    st.sampled_from(sorted(RECIPES)),
    st.tuples(
        st.lists(st.sampled_from(LAYOUT), max_size=4, unique=True),
        st.lists(st.sampled_from(sorted(VALUES)), max_size=5, unique=True),
    ).flatmap(lambda keys: st.fixed_dictionaries({key: VALUES[key] for key in {*keys[0], *keys[1]}})),
)
MACHINES = st.sampled_from([LAPTOP, H100_NODE])


def origins_of(spec: RunSpec) -> dict[str, Origin]:
    found = {}
    for path in schema_keys():
        value = value_at(spec, path)
        found[path] = Origin("command line", "command line", value in (None, "auto"))
    return found


def value_of(override: str):
    """As the command line reads it."""
    problems: list[SpecProblem] = []
    (parsed,) = parse_overrides([override], problems).values
    assert problems == [], override
    return parsed.key, parsed.value


@settings(max_examples=60, deadline=None)
@example(("tiny", {"data.blend": ("", "2 x")}), LAPTOP, "validate")
@example(("tiny", {"data.blend": ("2 x", "0"), "data.corpus": None}), LAPTOP, "validate")
@example(("tiny", {"parallel.tp": 10**9, "cluster.nodes": 3, "cluster.devices_per_node": 7}), LAPTOP, "train")
@example(("tiny", {"parallel.cp_comm_type": ()}), LAPTOP, "validate")
@example(("tiny", {"parallel.ep": 10**9}), LAPTOP, "train")  # no suggestion of a cluster is sought among 10**9
@example(("tiny", {"parallel.dp_replicate": 10**9}), LAPTOP, "train")
@example(("tiny", {"parallel.etp": 10**9, "parallel.pp": 16, "batch.global_batch_size": 8}), LAPTOP, "validate")
@given(SPECS, MACHINES, st.sampled_from(["validate", "train"]))
def test_the_checker_never_raises_and_shown_fixes_are_right(drawn, machine, purpose):
    recipe, values = drawn
    asked = with_values(_base(recipe), values)
    spec = resolve(asked, machine, recipe).spec
    findings = check(spec, origins_of(asked), purpose, machine)
    known = {(f.rule, f.path) for f in findings if f.severity != "note"}
    assert findings_text(findings, derived_values(spec))
    for finding in findings:
        for fix in finding.fixes:  # applied as a user would: to the overrides, then all over again
            changed = with_values(asked, dict(value_of(override) for override in shlex.split(fix)))
            fixed = resolve(changed, machine, recipe).spec
            after = check(fixed, origins_of(changed), purpose, machine)
            assert (finding.rule, finding.path) not in {(f.rule, f.path) for f in after}, fix
            assert {(f.rule, f.path) for f in after if f.severity != "note"} - {MORE_MACHINES} <= known, fix
    if not has_errors(findings):
        topology = Topology.from_spec(spec)
        assert topology.dense_grid.world == topology.expert_grid.world == topology.world
        assert topology.dp_shard * topology.dp_replicate == topology.dp
        assert topology.micro_batch_size * topology.dp * topology.microbatches == spec.batch.global_batch_size
        assert topology.edp * topology.ep * topology.etp * topology.pp == topology.world
        if spec.model.num_layers <= MAX_LAYERS:
            stages = build_stages(spec)
            assert [layer for stage in stages for layer in stage.layers] == list(range(spec.model.num_layers))
            assert sum(len(stage.mtp) for stage in stages) == spec.model.mtp.num_layers


@settings(max_examples=40, deadline=None)
@given(SPECS)
@example(("deepseek_v3", {"checkpoint.local.interval": 1}))  # cluster.nodes is "auto"
def test_a_spec_that_was_never_resolved_does_not_break_the_checker(drawn):
    recipe, values = drawn
    spec = with_values(_base(recipe), values)
    check(spec)
    check(replace(spec, parallel=replace(spec.parallel, dp=2)), None, "train")


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*schema_keys(), "model.x", "data.corpus"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.none())),
        max_size=6,
    )
)
def test_values_of_any_type_are_taken_or_refused(values):
    try:
        spec = with_values(_base("tiny"), values)
    except SpecError:
        return
    check(resolve(spec, LAPTOP, "tiny").spec)
