"""Each rule: one case that triggers it alone, and a near miss that is right."""

from dataclasses import replace

import pytest
from made_specs import resolved

from megalaunch.config.schema import with_values
from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding, as_json, has_errors, in_order
from megalaunch.plan.rules.registry import RULES, rule

TINY = ("recipe=tiny", "data.corpus=x")
H100 = ("platform=h100", "cluster.devices_per_node=8")


def findings(*words, base=TINY, purpose="validate"):
    spec, composition = resolved(*base, *words)
    found = check(spec, composition.origins, purpose)
    ahead = ("engine.unsupported", "launcher.multi_node")
    return [finding for finding in found if purpose == "train" or finding.rule not in ahead]


# rule: (words that break it alone, words of a near miss)
CASES = {
    "model.head_dim": (["model.num_attention_heads=6"], ["model.num_attention_heads=6", "model.head_dim=8"]),
    "model.head_dim_even": (["model.head_dim=7"], ["model.head_dim=6"]),
    "model.heads_by_groups": (["model.num_query_groups=3"], ["model.num_query_groups=4"]),
    "model.positions": (["batch.sequence_length=1025"], ["batch.sequence_length=1024"]),
    "model.vocab_covers_tokenizer": (["model.vocab_size=319"], ["model.vocab_size=320"]),
    "parallel.world": ([*H100, "parallel=pp2cp2tp4"], [*H100, "parallel=pp2tp4"]),
    "parallel.dp_assertion": ([*H100, "parallel=tp2dp2"], [*H100, "parallel=tp4dp2"]),
    "parallel.ep_needs_experts": (["parallel=dp2ep2"], ["parallel=dp2ep1"]),
    "parallel.replicas_by_dp": (["parallel=dp2hsdp4"], ["parallel=dp4hsdp2"]),
    "parallel.replicas_need_sharding": (["parallel=dp4hsdp2zero0"], ["parallel=dp4hsdp2zero2"]),
    "parallel.heads_by_tp": (
        ["parallel=tp8", "model.num_query_groups=2"],
        ["parallel=tp8", "model.num_attention_heads=8"],
    ),
    "parallel.ffn_by_tp": (["parallel=tp4", "model.ffn_hidden_size=66"], ["parallel=tp4", "model.ffn_hidden_size=68"]),
    "parallel.vocab_by_tp": (
        ["parallel=tp4", "tokenizer.vocab_size=322"],
        ["parallel=tp4", "tokenizer.vocab_size=324"],
    ),
    "parallel.groups_by_tp": (
        ["model.num_attention_heads=12", "model.num_query_groups=4", "parallel=tp6", "model.head_dim=2",
         "model.ffn_hidden_size=60", "tokenizer.vocab_size=300"],
        ["model.num_attention_heads=12", "model.num_query_groups=3", "parallel=tp6", "model.head_dim=2",
         "model.ffn_hidden_size=60", "tokenizer.vocab_size=300"],
    ),
    "parallel.layers_by_pp": (["model.num_layers=3", "parallel=pp2"], ["model.num_layers=4", "parallel=pp2"]),
    "parallel.vpp_needs_pp": (["parallel=vpp2"], ["parallel=vpp1"]),
    "parallel.layers_by_vpp": (
        ["parallel=pp2vpp2", "model.num_layers=6"],
        ["parallel=pp2vpp3", "model.num_layers=6"],
    ),
    "parallel.vpp_microbatches": (
        ["parallel=pp2vpp2", "model.num_layers=4", "batch.global_batch_size=6"],
        ["parallel=pp2vpp2", "model.num_layers=4", "batch.global_batch_size=8"],
    ),
    "parallel.sp_needs_tp": (["parallel=sp"], ["parallel=tp2sp"]),
    "parallel.sequence_by_cp": (
        ["parallel=cp4", "batch.sequence_length=36"],
        ["parallel=cp4", "batch.sequence_length=40"],
    ),
    "parallel.sequence_by_tp": (
        ["parallel=tp4sp", "batch.sequence_length=30"],
        ["parallel=tp4sp", "batch.sequence_length=28"],
    ),
    "batch.global_by_dp": (["parallel=dp3"], ["parallel=dp3", "batch.global_batch_size=12"]),
    "schedule.warmup": (["schedule.warmup_steps=20"], ["schedule.warmup_steps=19"]),
    "schedule.min_lr": (["schedule.min_lr=0.011"], ["schedule.min_lr=0.01"]),
    "schedule.wsd": (["schedule=wsd", "schedule.wsd_decay_steps=17"], ["schedule=wsd", "schedule.wsd_decay_steps=16"]),
    "optimizer.betas": (["optimizer.beta2=1.0"], ["optimizer.beta2=0.999"]),
    "train.stop_at": (["train.stop_at=21"], ["train.stop_at=20"]),
    "data.source": (["data.corpus=null"], ["data.corpus=y"]),
    "data.validation_source": (["data.validation_prefix=PREFIX"], ["data.validation_prefix=null"]),
    "data.tokens_exist": (
        ["data.corpus=null", "data.train_prefix=none/at/all", "tokenizer.path=TOKENIZER"],
        ["data.corpus=null", "data.train_prefix=PREFIX", "tokenizer.path=TOKENIZER"],
    ),
    "tokenizer.path": (["tokenizer.path=none/at/all.json"], ["tokenizer.path=TOKENIZER"]),
    "tokenizer.of_tokens": (
        ["data.corpus=null", "data.train_prefix=PREFIX"],
        ["data.corpus=null", "data.train_prefix=PREFIX", "tokenizer.path=TOKENIZER"],
    ),
    "platform.chip": (["platform.chip=h1000"], ["platform.chip=h100", "cluster.devices_per_node=1"]),
    "cluster.devices": (["platform=h100"], ["platform=h100", "cluster.devices_per_node=2"]),
    "run.name": (["run.name=a/b"], ["run.name=a-b_c.1"]),
}  # fmt: skip
TOGETHER = {"parallel.expert_world": (["parallel=dp2ep3"], ["parallel=dp3ep3", "batch.global_batch_size=12"])}
WHEN_TRAINING = {
    "engine.unsupported": (["parallel=tp2"], ["parallel=dp2"]),
    "launcher.multi_node": (["cluster.nodes=2"], ["cluster.nodes=1"]),
}


@pytest.fixture
def files(tmp_path):
    for name in ("t.bin", "t.idx", "tokenizer.json"):
        (tmp_path / name).touch()
    names = {"PREFIX": str(tmp_path / "t"), "TOKENIZER": str(tmp_path / "tokenizer.json")}

    def fill(words):
        for name, value in names.items():
            words = [word.replace(name, value) for word in words]
        return words

    return fill


def test_every_rule_has_a_case():
    assert set(CASES) | set(TOGETHER) | set(WHEN_TRAINING) == set(RULES)
    assert all(entry.sentence.endswith(".") for entry in RULES.values())


@pytest.mark.parametrize("rule_id", CASES)
def test_a_rule_alone_and_its_near_miss(rule_id, files):
    broken, right = CASES[rule_id]
    assert [finding.rule for finding in findings(*files(broken))] == [rule_id]
    assert findings(*files(right)) == []


@pytest.mark.parametrize("rule_id", TOGETHER)
def test_a_rule_that_cannot_be_alone_yet(rule_id):
    broken, right = TOGETHER[rule_id]
    assert [f.rule for f in findings(*broken)] == ["parallel.ep_needs_experts", rule_id]
    assert rule_id not in [f.rule for f in findings(*right)]


@pytest.mark.parametrize("rule_id", WHEN_TRAINING)
def test_what_only_a_launch_refuses(rule_id):
    broken, right = WHEN_TRAINING[rule_id]
    found = [f for f in findings(*broken, purpose="train") if f.severity == "error"]
    assert [f.rule for f in found] == [rule_id]
    assert found[0].fixes
    spec, composition = resolved(*TINY, *broken)
    looked_at = check(spec, composition.origins, "validate")
    assert [(f.rule, f.severity) for f in looked_at] == [(rule_id, "note")]
    assert findings(*right, purpose="train") == []


def test_data_may_be_open_in_a_plan_but_not_in_a_launch():
    for purpose, severity in (("validate", "warning"), ("train", "error")):
        (finding,) = findings("data.corpus=null", purpose=purpose)
        assert (finding.rule, finding.severity) == ("data.source", severity)
    (finding,) = findings("data.train_prefix=x", "tokenizer.path=pyproject.toml", purpose="train")[:1]
    assert (finding.rule, finding.severity) == ("data.source", "error")


def test_the_world_of_llama3_8b_under_tp4pp4():
    spec, composition = resolved("recipe=llama3_8b", "parallel=tp4pp4")
    errors = [f for f in check(spec, composition.origins) if f.severity == "error"]
    assert [f.rule for f in errors] == ["parallel.world"]
    assert errors[0].path == "cluster.nodes"
    assert errors[0].message == "the world has 8 devices (1 x 8); the layout needs 16 (tp 4 x pp 4)"
    assert errors[0].numbers == {"world": 8, "need": 16, "tp": 4, "pp": 4}
    assert errors[0].fixes[0] == "cluster.nodes=2"
    assert "llama3_8b.yaml:" in errors[0].origin
    fixed, composition = resolved("recipe=llama3_8b", "parallel=tp4pp4", "cluster.nodes=2")
    assert not has_errors(check(fixed, composition.origins))


def test_all_that_is_wrong_comes_at_once():
    words = ("parallel=tp3pp7", "batch.sequence_length=9000", "optimizer.beta1=1", "train.stop_at=99999")
    spec, composition = resolved("recipe=llama3_8b", *words)
    errors = [f.rule for f in check(spec, composition.origins) if f.severity == "error"]
    assert errors == [
        "model.positions",
        "parallel.world",
        "optimizer.betas",
        "parallel.layers_by_pp",
        "parallel.ffn_by_tp",
        "parallel.groups_by_tp",
        "parallel.heads_by_tp",
        "train.stop_at",
    ]


def test_a_finding_says_where_the_value_comes_from():
    (finding,) = findings("parallel=tp8", "model.num_query_groups=2")
    assert finding.origin == "parallel=tp8"
    assert as_json(finding)["numbers"] == {"num_attention_heads": 4, "tp": 8}


def test_a_given_dp_is_kept_when_a_fix_is_proven():
    """Open, dp follows the fix; asserted, a smaller tp leaves another dp, so it is no fix."""
    (found,) = findings(*H100, "parallel=tp8", "model.num_query_groups=2")
    assert found.fixes == ("parallel.tp=4", "parallel.tp=2")  # tp=1 leaves dp 8, too many for the batch
    (found,) = findings(*H100, "parallel=tp8dp1", "model.num_query_groups=2")
    assert found.fixes == ()


def test_findings_are_sorted():
    made = [Finding("a", severity, path, "m") for severity in ("note", "error", "warning") for path in ("b", "a")]
    assert [(f.severity, f.path) for f in in_order(made)] == [
        (severity, path) for severity in ("error", "warning", "note") for path in ("a", "b")
    ]


def test_an_id_is_given_once():
    with pytest.raises(ValueError, match="two rules have the id"):
        rule("model.positions", "Again.")(lambda at: iter(()))


def test_a_spec_without_origins_is_checked_too():
    spec, _ = resolved(*TINY, "parallel=tp8", "model.num_query_groups=2")
    (finding,) = [f for f in check(spec) if f.severity == "error"]
    assert finding.origin == ""
    assert finding.fixes == ("parallel.tp=4", "parallel.tp=2", "parallel.tp=1")
    assert has_errors(check(replace(spec, run=with_values(spec, {"run.name": ".."}).run)))
