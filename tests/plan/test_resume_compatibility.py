import pytest
from made_specs import LAPTOP, resolved

from megalaunch.plan.resolve import resolve
from megalaunch.plan.resume_compatibility import CHANGEABLE, compatible_changes, incompatible_changes
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.build import leaves

OVERRIDES = ("recipe=tiny", "data.corpus=x")
CACHE = "/cache/corpora/0123/"
PREPARED = {
    "data.train_prefix": f"{CACHE}train",
    "data.validation_prefix": f"{CACHE}validation",
    "tokenizer.path": f"{CACHE}tokenizer.json",
    "model.vocab_size": 300,
}


def stored():
    return with_values(resolved(*OVERRIDES)[0], PREPARED)


def rerun(*overrides, values=None):
    spec, _ = resolved(*OVERRIDES, *overrides, stored=stored())
    return with_values(spec, values or {})


def refused(*overrides, values=None):
    return [finding.path for finding in incompatible_changes(rerun(*overrides, values=values), stored())]


def test_the_same_overrides_are_the_same_run_before_and_after_preparation():
    assert refused() == []
    assert refused(values=PREPARED) == []
    assert compatible_changes(rerun(values=PREPARED), stored()) == []


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=40",
        "train.exit_at_step=3",
        "train.validation_interval=1",
        "logging.log_interval=5",
        "parallel=dp4",
        "parallel=zero3dp1",
        "cluster.cpu_workers=1",
        "launcher.max_restarts=0",
        "checkpoint.interval=1",
        "batch.micro_batch_size=1",
        "run.name=other",
        "run.resume=required",
        "data.cache_directory=/elsewhere",
        "parallel.overlap_moe_expert_parallel_comm=true",
        "parallel.pipeline_layout=Et|tL",
        "recompute.granularity=full",
        "optimizer.optimizer_offload_fraction=0.5",
        "checkpoint.async_save=true",
        "model.name=other",
    ],
)
def test_what_may_change(override):
    assert refused(override) == []


@pytest.mark.parametrize(
    ("override", "paths"),
    [
        ("model.num_layers=3", ["model.num_layers"]),
        ("model.rope.theta=5", ["model.rope.theta"]),
        ("train.seed=5", ["train.seed"]),
        ("optimizer.lr=0.5", ["optimizer.lr", "schedule.min_lr"]),
        ("schedule.min_lr=0.0", ["schedule.min_lr"]),
        ("schedule.decay_steps=40", ["schedule.warmup_steps", "schedule.decay_steps"]),
        ("batch.global_batch_size=16", ["batch.global_batch_size"]),
        ("batch.sequence_length=16", ["batch.sequence_length"]),
        ("tokenizer.vocab_size=512", ["tokenizer.vocab_size"]),
        ("data.num_samples=7", ["data.num_samples"]),
        ("data.append_eod=false", ["data.append_eod"]),
        ("precision=bf16", ["precision.compute_dtype"]),
        ("precision.exp_avg_dtype=bf16", ["precision.exp_avg_dtype"]),
        ("precision.fp8.recipe=mxfp8", ["precision.fp8.recipe"]),
        ("model.moe.top_k=3", ["model.moe.top_k"]),
        ("model.mtp.loss_coeff=0.3", ["model.mtp.loss_coeff"]),
        ("model.init_std=0.01", ["model.init_std", "model.embedding_init_std"]),
        ("data.fim_rate=0.5", ["data.fim_rate"]),
        ("data.reset_attention_mask=true", ["data.reset_attention_mask"]),
        ("optimizer.momentum=0.5", ["optimizer.momentum"]),
        ("batch.rampup_batch_size=0:4,1K:8", ["batch.rampup_batch_size"]),
        ("data.corpus=y", ["data.corpus", "data.train_prefix", "data.validation_prefix", "tokenizer.path"]),
    ],
)
def test_what_makes_another_run(override, paths):
    assert refused(override) == paths
    first = incompatible_changes(rerun(override), stored())[0]
    assert "restore the value, or give another run.directory" in first.message
    assert first.severity == "error"
    branches = not any(path.startswith(("model.", "tokenizer.")) for path in paths)
    hint = f"; with checkpoint.branch_from={stored().run.directory} it starts from this run's newest state"
    assert first.message.endswith(hint if branches else "give another run.directory")


def test_a_corpus_that_changed_under_its_name_is_another_run():
    other = {key: str(value).replace("0123", "9999") for key, value in PREPARED.items() if key != "model.vocab_size"}
    assert refused(values=other) == ["data.train_prefix", "data.validation_prefix", "tokenizer.path"]
    moved = {key: str(value).replace("/cache", "/mnt/cache") for key, value in PREPARED.items() if "." in str(value)}
    assert refused(values={k: v for k, v in moved.items() if k != "model.vocab_size"}) == []


def test_conversations_are_compared_by_content_as_a_corpus_is():
    overrides = ("recipe=tiny", "data.sft_data=talks.jsonl")
    began = with_values(resolved(*overrides)[0], {**PREPARED, "model.vocab_size": 320})
    again = resolved(*overrides, stored=began)[0]
    assert incompatible_changes(again, began) == []
    other = with_values(again, {"data.train_prefix": "/cache/corpora/9999/train"})
    assert [finding.path for finding in incompatible_changes(other, began)] == ["data.train_prefix"]


def test_an_allowed_change_is_said():
    (note,) = compatible_changes(rerun("train.steps=40"), stored())
    assert note.message == "train.steps: 20 -> 40"
    assert note.severity == "note"


def test_the_list_names_keys_that_exist():
    paths = [path for path, _, _ in leaves(RunSpec)]
    for entry in CHANGEABLE:
        assert any(path == entry or (entry.endswith(".") and path.startswith(entry)) for path in paths), entry


def test_stored_horizons_come_back():
    spec = resolve(resolved(*OVERRIDES)[1].spec, LAPTOP, "tiny", stored()).spec
    assert spec.data.num_samples == stored().data.num_samples


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (None, "weights", False),
        ("weights", None, False),
        ("weights", "others", False),
        ("weights", "weights", True),
        ("weights", "./weights", True),
    ],
)
@pytest.mark.parametrize("key", ["checkpoint.load_pretrained", "checkpoint.branch_from"])
def test_what_a_run_began_with_stays(key, before, now, same):
    then = with_values(stored(), {key: before})
    again = with_values(stored(), {key: now})
    found = incompatible_changes(again, then)
    assert [finding.path for finding in found] == ([] if same else [key])
    assert same or found[0].message.endswith("or give another run.directory"), "a branch is a beginning too"
    assert compatible_changes(again, then) == []


def test_a_warmup_in_steps_is_the_same_run_as_its_fraction():
    overrides = ("recipe=quickstart", "data.corpus=x")
    begun = resolved(*overrides, "schedule.warmup_steps=30", "schedule.warmup_fraction=0")[0]
    assert incompatible_changes(resolved(*overrides)[0], begun) == []
    shorter = resolved(*overrides, "schedule.warmup_fraction=0.05")[0]
    assert [finding.path for finding in incompatible_changes(shorter, begun)] == ["schedule.warmup_steps"]
