"""How findings are found together: order, origins, fixes that are proven, purposes. (Each rule alone: rule_cases.)"""

import shlex
import time
from dataclasses import replace

import pytest
from made_specs import H100_NODE, LAPTOP, resolved
from rule_cases import H100, TINY

from megalaunch.config.hydra.grammar import read_value
from megalaunch.plan.check import check
from megalaunch.plan.findings import Finding, as_json, as_override, has_errors, sort_findings
from megalaunch.plan.rules.registry import RULES, Rule, Violation, rule
from megalaunch.schema import with_values


def findings(*overrides, base=TINY, purpose="validate"):
    spec, composition = resolved(*base, *overrides)
    found = check(spec, composition.origins, purpose)
    return [finding for finding in found if finding.severity != "note"]


def test_data_may_be_open_unless_mock_tokens_are_refused():
    assert findings("data.corpus=null", purpose="train") == []
    (finding,) = findings("data.corpus=null", "data.mock=false")
    assert (finding.rule, finding.severity, finding.fixes) == ("data.source", "error", ("data.mock=null",))
    (finding,) = findings("data.train_prefix=x", "tokenizer.path=pyproject.toml", purpose="train")[:1]
    assert (finding.rule, finding.severity, finding.fixes[0]) == ("data.source", "error", "data.corpus=null")


def test_addresses_and_names_on_hubs_are_no_paths():
    (finding,) = findings("data.corpus=https://a.example/texts/b.jsonl?download=1")
    assert (finding.rule, finding.severity, finding.path) == ("run.local_paths", "error", "data.corpus")
    assert finding.message.endswith("which is not downloaded: fetch it first, then give its path, data.corpus=b.jsonl")
    (finding,) = [f for f in findings("checkpoint.load_pretrained=s3://a/b") if f.rule == "run.local_paths"]
    assert finding.message.endswith("checkpoint.load_pretrained=b")
    assert findings("checkpoint.load_pretrained=hf://a/b", "tokenizer.path=hf://a/b", "data.corpus=hf://a/b") == []
    (finding,) = findings("tokenizer.path=meta-llama/Llama-3.1-8B")
    assert "a tokenizer of the Hugging Face Hub is hf://" in finding.message


@pytest.mark.parametrize(
    ("launcher", "spares"),
    [("ssh", "launcher.ssh.hosts=[a,b,c]"), ("slurm", "launcher.slurm.spare_nodes=1")],
)
def test_slow_nodes_are_replaced_only_where_the_ranks_are_checked(launcher, spares):
    key = f"launcher.{launcher}.replace_stragglers"
    run = (f"launcher={launcher}", "cluster.nodes=2", "cluster.devices_per_node=1", spares, f"{key}=true")
    for unchecked in ((), ("train.straggler_interval=0",)):
        (finding,) = findings(*run, *unchecked)
        assert (finding.rule, finding.path) == (f"launcher.{launcher}_replace_stragglers", key)
        assert finding.fixes == ("train.straggler_interval=100", f"{key}=false")
    assert findings(*run, "train.straggler_interval=5") == []


def test_the_reference_that_replaces_a_secret_can_be_pasted():
    pods = ("launcher=kubernetes", "launcher.kubernetes.image=x")
    (finding,) = findings(*pods, "launcher.kubernetes.environment=['HF_TOKEN=x']")
    reference = finding.message.partition("write ")[2].replace("SECRET/KEY", "hub/token")
    assert findings(*pods, *shlex.split(reference)) == []


@pytest.mark.parametrize("typed", ["Hunter2/", "HF_TOKEN:Hunter2/", "Hunter2/c2VjcmV0=="])
@pytest.mark.parametrize(
    ("key", "good", "form"),
    [
        ("secrets", "A=hub/token", "NAME=SECRET/KEY"),
        ("environment", "A=b", "NAME=VALUE"),
        ("image_pull_secrets", "registry", "the name of a secret"),
    ],
)
def test_an_entry_that_may_be_a_secret_is_not_repeated(key, good, form, typed):
    """Somebody may type the secret itself in place of its name; the message may be in the log of a CI system."""
    pods = ("launcher=kubernetes", "launcher.kubernetes.image=x")
    (finding,) = findings(*pods, f"launcher.kubernetes.{key}=[{good!r},{typed!r}]")
    assert (finding.path, finding.message) == (f"launcher.kubernetes.{key}", f"entry 2 of 2 is not {form}")
    assert "Hunter2" not in str(finding)
    assert findings(*pods, *shlex.split(finding.fixes[0])) == []


def test_names_and_volumes_that_no_pod_could_have():
    pods = ("launcher=kubernetes", "launcher.kubernetes.image=x")
    (finding,) = findings(*pods, "launcher.kubernetes.volumes=['a:/data:ro','/x:/data/']")
    assert finding.message == "'a:/data:ro' and '/x:/data/' are mounted at the same path"
    assert finding.fixes == ("'launcher.kubernetes.volumes=[a:/data:ro]'",)
    assert findings(*pods, "launcher.kubernetes.volumes=['a:/data','a:/other']") == []
    (finding,) = findings(*pods, "launcher.kubernetes.queue=My_Queue")
    assert finding.message == "'My_Queue' is no name of an object: lower-case letters, digits, '-' and '.'"
    assert findings(*pods, "launcher.kubernetes.queue=my-queue") == []


def test_a_learning_rate_that_is_far_too_high_has_a_fix():
    for overrides in (["optimizer.lr=1"], ["optimizer.lr=5", "schedule.min_lr=0.01"], ["optimizer.embedding_lr=3"]):
        (finding,) = findings(*overrides)
        assert (finding.rule, finding.severity) == ("optimizer.rate_too_high", "warning")
        assert finding.fixes
    assert not findings("optimizer=muon", "optimizer.lr=0.5")
    (finding,) = findings("optimizer=muon", "optimizer.lr=1")
    assert finding.fixes


def test_the_decay_that_removes_weights_may_be_the_last_of_a_schedule():
    growth = ("schedule.weight_decay_incr_style=linear", "schedule.start_weight_decay=0")
    (finding,) = findings(*growth, "schedule.end_weight_decay=100")
    assert (finding.rule, finding.path) == ("optimizer.decay_by_rate", "schedule.end_weight_decay")
    assert "lr 0.01 x end_weight_decay 100 = 1" in finding.message


def test_more_workers_than_the_cores_can_carry():
    spec, composition = resolved(*TINY, "parallel=dp64", "batch.global_batch_size=128")
    machine = replace(LAPTOP, memory_bytes=2**40)
    (finding,) = [f for f in check(spec, composition.origins, machine=machine) if f.severity != "note"]
    assert finding.rule == "cluster.cores"
    assert finding.message == (
        "64 workers share the 2 cores of this machine, 32 per core: each step takes that much longer"
    )
    assert finding.fixes == ("parallel.dp=2", "parallel.dp=1")
    assert not [f for f in check(spec, composition.origins) if f.severity != "note"]  # another machine


def test_the_world_of_llama3_8b_under_tp4pp4():
    spec, composition = resolved("recipe=llama3_8b", "parallel=tp4pp4", machine=H100_NODE)
    errors = [f for f in check(spec, composition.origins) if f.severity == "error"]
    assert [f.rule for f in errors] == ["parallel.world"]
    assert errors[0].path == "cluster.nodes"
    assert errors[0].message == "the world has 8 devices (1 x 8); the layout needs 16 (tp 4 x pp 4)"
    assert errors[0].numbers == {"world": 8, "need": 16, "tp": 4, "pp": 4}
    assert errors[0].fixes == ("cluster.nodes=2", "parallel.pp=2", "parallel.tp=2")
    fixed, composition = resolved("recipe=llama3_8b", "parallel=tp4pp4", "cluster.nodes=2", machine=H100_NODE)
    assert not has_errors(check(fixed, composition.origins))


def test_a_world_error_offers_more_nodes_to_a_run_that_starts_too():
    """How to start several nodes is a finding of its own, and no reason against them."""
    spec, composition = resolved("recipe=llama3_8b", "parallel=tp4pp4", machine=H100_NODE)
    machine = replace(H100_NODE, free_disk=LAPTOP.free_disk)
    (error,) = [f for f in check(spec, composition.origins, "train", machine) if f.severity == "error"]
    assert error.fixes[0] == "cluster.nodes=2"


@pytest.mark.parametrize(
    ("overrides", "rule_id", "fix"),
    [
        ("recipe=llama3_8b parallel=tp4 cluster.nodes=1 cluster.devices_per_node=6", "parallel.world",
         "cluster.devices_per_node=4"),
        ("recipe=pythia_160m parallel=dp16 cluster.nodes=1", "parallel.dp_assertion", "cluster.nodes=2"),
        ("recipe=mixtral_8x7b cluster.nodes=3", "parallel.expert_world", "cluster.nodes=4"),
        ("recipe=pythia_160m parallel=hsdp3 cluster.nodes=1 batch.global_batch_size=960", "parallel.dp_replicate_by_dp",
         "cluster.nodes=3"),
    ],
)  # fmt: skip
def test_every_world_error_offers_another_cluster(overrides, rule_id, fix):
    (found,) = [f for f in findings(base=tuple(overrides.split())) if f.rule == rule_id]
    assert fix in found.fixes


@pytest.mark.parametrize(
    ("overrides", "rule_id", "fix"),
    [
        ("recipe=deepseek_tiny model.attention_output_gate=true", "mla.plain", "model.attention_output_gate=false"),
        ("recipe=deepseek_tiny model.sliding_window=4 model.sliding_window_pattern=3", "mla.plain",
         "model.sliding_window=null model.sliding_window_pattern=null"),
        ("recipe=qwen3_moe_tiny parallel=dp3ep2 cluster.devices_per_node=3 batch.global_batch_size=6 "
         "parallel.moe_token_dispatcher_type=allgather", "parallel.expert_world",
         "parallel.ep=1 parallel.etp=1 parallel.moe_token_dispatcher_type=alltoall"),
        ("recipe=llama_tiny parallel=pp2vpp2 cluster.devices_per_node=2 parallel.schedule=dualpipev",
         "parallel.layers_by_vpp", "parallel.vpp=null parallel.schedule=auto"),
        ("recipe=llama_tiny parallel=pp4vpp2 cluster.devices_per_node=4 parallel.schedule=zbv model.num_layers=4 "
         "parallel.account_for_loss_in_pipeline_split=true", "parallel.layers_by_pp",
         "parallel.account_for_loss_in_pipeline_split=false parallel.vpp=null parallel.schedule=auto"),
    ],
)  # fmt: skip
def test_a_fix_takes_the_settings_along_that_need_what_it_removes(overrides, rule_id, fix):
    """A pattern of windows without a window, a dispatcher without ep or a V schedule without vpp is a finding too."""
    (found,) = [
        f for f in findings("cluster.nodes=1", "data.corpus=x", base=tuple(overrides.split())) if f.rule == rule_id
    ]
    assert fix in found.fixes, found.fixes


def test_a_fix_of_an_assumed_cluster_assumes_it_again():
    """On a laptop the nodes follow the layout: 3 nodes hold tp 4 x pp 6, and one holds the fix pp 2."""
    spec, composition = resolved("recipe=llama3_8b", "parallel=tp4pp6")
    (error,) = [f for f in check(spec, composition.origins, machine=LAPTOP) if f.severity == "error"]
    assert (error.rule, spec.cluster.nodes) == ("parallel.layers_by_pp", 3)
    assert "parallel.pp=2 cluster.nodes=1" in error.fixes  # with 3, dp 3 does not divide the batch


@pytest.mark.parametrize("machine", [LAPTOP, H100_NODE], ids=["laptop", "h100"])
@pytest.mark.parametrize(
    "overrides",
    ["parallel=tp4pp6", "parallel=tp4pp4 model.num_layers=33", "parallel=tp5pp2", "parallel=tp8 recompute=none"],
)
def test_a_fix_holds_as_typed_where_nodes_are_assumed_and_where_they_are_found(overrides, machine):
    """A check that does not know the machine, as of `plan`."""
    words = ("recipe=llama3_8b", *overrides.split())
    spec, composition = resolved(*words, machine=machine)
    errors = [f for f in check(spec, composition.origins) if f.severity == "error"]
    assert errors or "recompute" in overrides
    for error in errors:
        assert error.fixes
        for fix in error.fixes:
            fixed, fixed_composition = resolved(*words, *fix.split(), machine=machine)
            left = {(f.rule, f.path) for f in check(fixed, fixed_composition.origins) if f.severity == "error"}
            assert left < {(f.rule, f.path) for f in errors}, (error.rule, fix)


def test_all_that_is_wrong_comes_at_once():
    overrides = ("parallel=tp3pp7", "batch.sequence_length=9000", "optimizer.beta1=1", "train.exit_at_step=99999")
    spec, composition = resolved("recipe=llama3_8b", "cluster.nodes=1", *overrides)
    errors = [f.rule for f in check(spec, composition.origins) if f.severity == "error"]
    assert errors == [
        "model.positions",
        "parallel.world",
        "optimizer.betas",
        "parallel.layers_by_pp",
        "parallel.ffn_by_tp",
        "parallel.groups_by_tp",
        "parallel.heads_by_tp",
        "train.exit_at_step",
    ]


def test_a_finding_says_where_the_value_comes_from():
    (finding,) = findings("parallel=tp8", "model.num_query_groups=2")
    assert finding.origin == "parallel=tp8"
    assert as_json(finding)["numbers"] == {"num_attention_heads": 4, "tp": 8}


def test_a_given_dp_does_not_change_when_a_fix_is_verified():
    """Open, dp follows the fix; asserted, a smaller tp leaves another dp, so it is no fix."""
    heads = ("model.num_query_groups=2", "batch.micro_batch_size=2")
    (found,) = findings(*H100, "parallel=tp8", *heads)
    assert found.fixes == ("parallel.tp=4", "parallel.tp=2")  # tp=1 leaves dp 8, too many for the batch
    (found,) = findings(*H100, "parallel=tp8dp1", *heads)
    assert found.fixes == ()


def test_findings_are_sorted():
    made = [Finding("a", severity, path, "m") for severity in ("note", "error", "warning") for path in ("b", "a")]
    assert [(f.severity, f.path) for f in sort_findings(made)] == [
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


def test_only_fixes_that_help_and_harm_nothing_are_shown(monkeypatch):
    """Of five: no change, still broken, a new error, a new warning, and a right one."""

    def steps(at):
        """Made up."""
        if at.spec.train.steps < 30:
            yield Violation("train.steps", "too few", {}, (
                {"train.steps": 20},
                {"train.steps": 21},
                {"train.steps": 30, "train.exit_at_step": 31},
                {"train.steps": 30, "parallel.schedule": "gpipe"},
                {"train.steps": 30},
            ))  # fmt: skip

    monkeypatch.setitem(RULES, "train.made_up", Rule("train.made_up", "Long.", steps))
    (found,) = [f for f in findings() if f.rule == "train.made_up"]
    assert found.fixes == ("train.steps=30",)


def test_many_findings_are_proven_fast():
    """A fix is tried against every rule, so time grows with findings x fixes x rules."""
    overrides = "parallel=tp3pp7cp6ep5etp2vpp2hsdp3sp batch.sequence_length=9001 optimizer.beta1=1 optimizer.beta2=1 "
    overrides += (
        "train.exit_at_step=99999999 schedule.warmup_steps=99999999 schedule.min_lr=1 model.num_query_groups=5 "
    )
    overrides += "model.head_dim=127 model.hidden_dropout=1 model.norm_epsilon=0 parallel.cp_comm_type=a2a+p2p "
    overrides += "parallel.dynamic_context_parallel=true run.name=a/b platform.chip=h1000 "
    overrides += "model.moe.top_k=9 parallel.num_layers_in_first_pipeline_stage=1"
    spec, composition = resolved("recipe=mixtral_8x22b", *overrides.split())
    check(spec, composition.origins)
    began = time.process_time()
    found = check(spec, composition.origins)
    assert time.process_time() - began < 0.5  # 0.1 s is usual on an idle core
    assert sum(finding.severity == "error" for finding in found) >= 20
    assert sum(bool(finding.fixes) for finding in found if finding.severity == "error") >= 16


@pytest.mark.parametrize("value", [2 / 1024, 1 / 3, 1e-5, 0.5, 3e-4])
def test_a_fix_shows_every_digit_that_counts(value):
    assert float(as_override(value)) == pytest.approx(value, rel=1e-11, abs=0)
    assert as_override(8.999999999999999e-05) == "9e-05"


@pytest.mark.parametrize(
    "items",
    [("2 x", "0"), ("a,b", "x"), ("null", "1e3", "true"), ('q"uo', "b\\c", 'b\\"', "end\\"), ("/a/b-c.d", "~/x"),
     ("it's", "é", ""), ("0.5 /a", "p:q@r"), (2, 4), ("a2a+p2p",), ("[a]", "{b}", "c=d", "$x")],
)  # fmt: skip
def test_a_list_in_a_fix_is_what_the_command_line_reads(items):
    assert read_value("data.blend", as_override(items)) == list(items)


@pytest.mark.parametrize(
    ("overrides", "rule_id", "fix"),
    [
        ("recipe=llama31_405b parallel=tp8pp8cp2vpp7sp", "parallel.layers_by_pp",
         "parallel.account_for_embedding_in_pipeline_split=true "
         "parallel.account_for_loss_in_pipeline_split=true parallel.vpp=8 cluster.nodes=32"),  # 16 lack memory
        ("recipe=llama3_8b parallel=tp8sp model.ffn_hidden_size=14337", "parallel.ffn_by_tp",
         "model.ffn_hidden_size=14336"),
        ("recipe=llama3_70b parallel=tp16pp4 cluster.nodes=8", "parallel.tp_within_machine",
         "parallel.tp=8 parallel.sequence_parallel=true"),
    ],
)  # fmt: skip
def test_common_invalid_layouts_have_a_fix(overrides, rule_id, fix):
    (found,) = [f for f in findings(base=tuple(overrides.split())) if f.rule == rule_id]
    assert fix in found.fixes
