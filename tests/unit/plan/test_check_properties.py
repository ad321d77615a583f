"""Random specs: the checker never raises, fixes that it shows are right, and what it calls valid divides."""

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_specs import H100_NODE, LAPTOP, resolved

from megalaunch.config.compose import Origin
from megalaunch.config.keys import schema_keys
from megalaunch.config.schema import RunSpec, SpecError, with_values
from megalaunch.config.schema.paths import value_at
from megalaunch.plan.check import check
from megalaunch.plan.findings import has_errors
from megalaunch.plan.resolve import resolve
from megalaunch.plan.topology import Topology

BASE = {
    "tiny": resolved("recipe=tiny", "data.corpus=x")[1].spec,
    "llama3_8b": resolved("recipe=llama3_8b", "data.corpus=x")[1].spec,
}
DEGREES = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5, 8, 16, 64, 10**9])
VALUES = {
    "parallel.tp": DEGREES,
    "parallel.pp": DEGREES,
    "parallel.cp": DEGREES,
    "parallel.ep": st.sampled_from([1, 1, 1, 2, 3]),
    "parallel.etp": st.sampled_from([None, 1, 2]),
    "parallel.vpp": st.sampled_from([None, 1, 2, 3]),
    "parallel.dp": st.sampled_from([None, None, 1, 2, 3, 8]),
    "parallel.replicas": st.sampled_from([1, 1, 2, 3]),
    "parallel.sequence_parallel": st.booleans(),
    "parallel.data_sharding": st.sampled_from(["no_shard", "optim", "optim_grads_params"]),
    "cluster.nodes": st.sampled_from([1, 1, 2, 3, 128]),
    "cluster.devices_per_node": st.sampled_from(["auto", 1, 2, 7, 8]),
    "batch.micro_batch_size": st.sampled_from([None, 1, 2, 3, 10**9]),
    "batch.global_batch_size": st.integers(1, 2**70) | st.sampled_from([1, 8, 12, 128]),
    "batch.sequence_length": st.sampled_from([1, 7, 32, 48, 8192, 10**12]),
    "model.num_layers": st.sampled_from([1, 2, 3, 32, 126]),
    "model.hidden_size": st.sampled_from([1, 32, 48, 4096]),
    "model.num_attention_heads": st.sampled_from([1, 3, 4, 32]),
    "model.num_query_groups": st.sampled_from([None, 1, 2, 3, 8]),
    "model.head_dim": st.sampled_from([None, 1, 8, 16]),
    "model.vocab_size": st.sampled_from([None, 257, 320, 128256]),
    "train.stop_at": st.sampled_from([None, 1, 10**6]),
    "schedule.warmup_steps": st.sampled_from([0, 4, 20, 10**7]),
    "schedule.shape": st.sampled_from(["cosine", "wsd", "constant"]),
    "schedule.min_lr": st.sampled_from([0.0, 1e-3, 5.0, 1e300]),
    "optimizer.beta1": st.sampled_from([0.0, 0.9, 1.0, 7.0]),
    "platform.chip": st.sampled_from(["auto", "cpu", "h100", "h1oo", ""]),
    "data.corpus": st.sampled_from([None, "x"]),
    "data.train_prefix": st.sampled_from([None, "y", "\0", "~nobody_/x", "z" * 5000]),
    "run.name": st.sampled_from([None, "..", "a b", "", "é" * 300]),
}
SPECS = st.tuples(
    st.sampled_from(sorted(BASE)),
    st.lists(st.sampled_from(sorted(VALUES)), max_size=8, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: VALUES[key] for key in keys})
    ),
)
MACHINES = st.sampled_from([LAPTOP, H100_NODE])


def origins_of(spec: RunSpec) -> dict[str, Origin]:
    found = {}
    for path in schema_keys():
        value = value_at(spec, path)
        found[path] = Origin("command line", "command line", value in (None, "auto"))
    return found


def value_of(word: str):
    key, _, text = word.partition("=")
    if text in ("null", "true", "false"):
        return key, {"null": None, "true": True, "false": False}[text]
    for kind in (int, float):
        try:
            return key, kind(text)
        except ValueError:
            continue
    return key, text


@settings(max_examples=80, deadline=None)
@example(("tiny", {"parallel.tp": 10**9, "cluster.nodes": 3, "cluster.devices_per_node": 7}), LAPTOP, "train")
@given(SPECS, MACHINES, st.sampled_from(["validate", "train"]))
def test_the_checker_never_raises_and_shown_fixes_are_right(drawn, machine, purpose):
    recipe, values = drawn
    asked = with_values(BASE[recipe], values)
    spec = resolve(asked, machine, recipe).spec
    findings = check(spec, origins_of(asked), purpose)
    errors = {(f.rule, f.path) for f in findings if f.severity == "error"}
    for finding in findings:
        for fix in finding.fixes:  # applied as a user would: to the words, then all over again
            changed = with_values(asked, dict(value_of(word) for word in fix.split(" ")))
            fixed = resolve(changed, machine, recipe).spec
            after = check(fixed, origins_of(changed), purpose)
            assert (finding.rule, finding.path) not in {(f.rule, f.path) for f in after}, fix
            assert {(f.rule, f.path) for f in after if f.severity == "error"} <= errors, fix
    if not has_errors(findings):
        topology = Topology.of(spec)
        assert topology.dense.world == topology.expert.world == topology.world
        assert topology.shards * topology.replicas == topology.dp
        assert topology.micro_batch_size * topology.dp * topology.microbatches == spec.batch.global_batch_size


@settings(max_examples=40, deadline=None)
@given(SPECS)
def test_a_spec_that_was_never_resolved_does_not_break_the_checker(drawn):
    recipe, values = drawn
    spec = with_values(BASE[recipe], values)
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
        spec = with_values(BASE["tiny"], values)
    except SpecError:
        return
    check(resolve(spec, LAPTOP, "tiny").spec)
