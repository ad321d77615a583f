"""A rehearsal from data to generated text: by the command, of every shipped recipe on forked ranks, and failing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from forked_training import train_forked
from made_specs import resolved
from slow_cases import slow_but
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.config.recipes import PACKAGED
from megalaunch.rundir.outcome import ExitCode, Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.rehearsal.own_files import describe_own_files
from megalaunch.runs.rehearsal.phases import PhaseFailed, Rehearsal
from megalaunch.runs.rehearsal.shrink import SAVED_STEP, STEPS, shrink
from megalaunch.runs.rehearsal.small_data import prepare_small_data
from megalaunch.schema import RunSpec
from megalaunch.schema.build import leaves
from megalaunch.schema.paths import value_at

RECIPES = sorted(path.stem for path in PACKAGED.glob("*.yaml"))
# Recipes whose blocks, axes and schedules others play, too: a twin for CPUs of each family with a published recipe
# here, another size, a family whose blocks another one has, and those with the most workers.
PLAYED_BY_OTHERS = (
    *("deepseek_v2_tiny", "gemma2_tiny", "gemma3_tiny", "gpt_neox_tiny", "gpt_oss_tiny", "gpt_tiny", "mistral_tiny"),
    *("mixtral_8x7b", "moonlight_16b", "olmo2_tiny", "olmoe_tiny", "phi3_tiny", "qwen15_moe_a2_7b", "qwen2_tiny"),
    *("qwen3_8b", "qwen3_tiny", "mistral_7b", "olmoe_7b", "qwen25_7b", "smollm3_3b", "gemma2_2b", "llama_tiny"),
    *("qwen3_moe_tiny", "smollm3_tiny", "tiny", "deepseek_v2", "gpt_oss_120b", "llama2_7b", "llama32_1b"),
    *("deepseek_v3", "gpt3_175b", "llama3_70b", "llama31_405b", "mixtral_8x22b", "qwen3_235b_a22b"),
    *("llama3_8b", "quickstart", "smollm2_135m"),
)
PHASES = ["data", "train", "resume", "reshard", "export", "generate"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["train", *arguments, "--rehearse"])


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, so that a test sees what is left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_whole_rehearsal_of_two_workers_by_the_command(temporary):
    """It takes 20 s: the only test of all six phases with launcher, agents and workers."""
    result = invoke("recipe=llama_tiny", "model.vocab_size=300", "parallel=tp2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:7]] == PHASES
    assert f"{STEPS} steps, loss 5." in result.stdout
    assert "bit for bit" in result.stdout
    assert "all 6 phases passed" in lines[-1]
    assert not list(temporary.glob("megalaunch-rehearsal-*"))


def test_a_dry_run_prints_every_difference():
    result = invoke("recipe=llama3_8b", "parallel=tp4pp4", "cluster.nodes=2", "cluster.devices_per_node=8", "--dry-run")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["model.num_layers", "32", "4"] in rows
    assert ["batch.sequence_length", "8192", "64"] in rows
    assert not any(row[0].startswith(("optimizer.", "recompute.", "precision.")) for row in rows)


FORMS = {
    "mock": (),
    "corpus": ("data.corpus=/none", "data.add_special_tokens=false", "tokenizer.path=/none/t.json"),
    "tokens": ("data.train_prefix=/none/a", "data.validation_prefix=/none/b", "tokenizer.path=/none/t.json"),
    "blend": ("data.blend=[/none/a,/none/b,/none/c,/none/d,/none/e]", "tokenizer.path=/none/t.json"),
    "chat": ("data.sft_data=/none/chats.jsonl", "data.chat_template=llama3", "tokenizer.path=/none/t.json"),
    "fim": ("data.train_prefix=/none/a", "data.fim_rate=0.5", "tokenizer.path=/none/t.json"),
}


@pytest.mark.parametrize("form", slow_but(FORMS, "blend", "chat"))
def test_a_dry_run_lists_what_changes_in_the_data(form, tmp_path):
    """What the phase `data` sets and the table does not list is a path of a prepared file."""
    overrides = ("recipe=llama_tiny", "model.vocab_size=300", *FORMS[form])
    listed = {line.split()[0] for line in invoke(*overrides, "--dry-run").stdout.splitlines()}
    run = resolved(*overrides)[0]
    played, _ = prepare_small_data(shrink(run).spec, tmp_path)
    changed = {path for path, _, _ in leaves(RunSpec) if value_at(run, path) != value_at(played, path)}
    prepared = {"data.train_prefix", "data.validation_prefix", "data.cache_directory", "tokenizer.path"}
    assert changed - prepared <= listed
    if form == "blend":
        assert len(played.data.blend) == 4
        assert "data.blend" in listed
    if form == "chat":
        assert "data.chat_template" in listed


def test_the_phase_data_says_whether_the_run_s_own_files_can_be_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"1")
    (tmp_path / "t.json").write_bytes(b"{}")
    spec = small_spec("recipe=llama_tiny", f"data.train_prefix={tmp_path}/a", f"tokenizer.path={tmp_path}/t.json")
    missing = f"the run's own data cannot be read here: {tmp_path}/a.idx: No such file or directory"
    assert prepare_small_data(spec, tmp_path / "small")[1].endswith(missing)
    (tmp_path / "a.idx").write_bytes(b"1")
    assert describe_own_files(spec) == "the run's own 3 data files can be read here"
    text = small_spec("recipe=llama_tiny", f"data.corpus={tmp_path}/*.txt")
    assert describe_own_files(text).startswith(f"the run's own data cannot be read here: {tmp_path}/*.txt: ")
    (tmp_path / "one.txt").write_text("words")
    assert describe_own_files(text) == "the run's own data file can be read here"
    assert describe_own_files(small_spec("recipe=llama_tiny")) == ""


def test_what_the_engine_does_not_train_is_refused_as_by_train():
    library = ("precision=fp8", "precision.fp8.implementation=transformer_engine", "precision.fp8.recipe=rowwise")
    result = invoke("recipe=mixtral_8x7b", *library)
    assert result.exit_code == 2
    assert "fp8.library_recipe" in result.stderr
    assert "Transformer Engine" in " ".join(result.stderr.split())


def test_contradicting_options_are_refused(tmp_path):
    assert "--prepare-only starts nothing" in invoke("recipe=llama_tiny", "--prepare-only").stderr
    result = CliRunner().invoke(app, ["train", "recipe=llama_tiny", "--run-dir", str(tmp_path)])
    assert (result.exit_code, "--run-dir is an option of --rehearse" in result.stderr) == (2, True)


def test_a_directory_with_files_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    result = invoke("recipe=llama_tiny", "--run-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "is not empty" in result.stderr


def test_a_failing_phase_is_named_with_its_cause_and_its_logs(temporary, monkeypatch):
    monkeypatch.setattr(
        "megalaunch.runs.rehearsal.workers.ForkedWorkers.__call__",
        lambda *_: (Outcome(ExitCode.NON_FINITE, "the loss is nan at step 1", 1), []),
    )
    result = invoke("recipe=llama_tiny")
    assert result.exit_code == ExitCode.NON_FINITE
    (root,) = temporary.glob("megalaunch-rehearsal-*")
    assert result.stderr.splitlines() == [
        "phase train failed (exit code 7)",
        "the loss is nan at step 1",
        f"logs: {root}/train",
        "next: correct it, then megalaunch train recipe=llama_tiny --rehearse",
    ]


def test_a_stopped_rehearsal_leaves_no_files(temporary, monkeypatch):
    monkeypatch.setattr(
        "megalaunch.runs.rehearsal.workers.ForkedWorkers.__call__",
        lambda *_: (Outcome(ExitCode.INTERRUPTED, "stopped by SIGINT after step 1", 1), []),
    )
    result = invoke("recipe=llama_tiny")
    assert result.exit_code == ExitCode.INTERRUPTED
    assert "stopped in the phase train" in result.stderr
    assert not list(temporary.glob("megalaunch-rehearsal-*"))


def small_spec(*overrides):
    return shrink(resolved(*overrides)[0]).spec


class Written:
    """Launches that only write metrics (`phases.Train`): every run the same, but for `spoil(name, step)`."""

    def __init__(self, spoil=lambda name, step: {}):
        self.spoil = spoil

    def __call__(self, spec, directory, line):
        first = 1 if directory.root.name == "train" else SAVED_STEP + 1
        directory.checkpoint(SAVED_STEP).mkdir(parents=True, exist_ok=True)
        records = [
            {"step": step, "loss": 5.0, "grad_norm": 2.0, **self.spoil(directory.root.name, step)}
            for step in range(first, STEPS + 1)
        ]
        directory.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        return Outcome(0, "", STEPS), []


@pytest.mark.parametrize(
    ("phase", "key", "factor", "passes"),
    [
        ("resume", "loss", 1 + 1e-7, False),
        ("resume", "grad_norm", 1 + 1e-7, False),
        ("reshard", "loss", 1 + 1e-4, True),
        ("reshard", "loss", 1 + 1e-2, False),
        ("reshard", "grad_norm", 1 + 1e-2, False),
        ("reshard", "step", 2, False),
    ],
)
def test_a_resumed_run_must_repeat_the_steps_of_the_run_without_interruption(tmp_path, phase, key, factor, passes):
    def spoil(name, step):
        values = {"loss": 5.0, "grad_norm": 2.0, "step": step}
        return {key: values[key] * factor} if name == phase else {}

    rehearsal = Rehearsal(small_spec("recipe=llama_tiny"), tmp_path, Written(spoil))
    with pytest.raises(PhaseFailed) as caught:
        rehearsal.play()
    # Nothing was trained, so without a difference the export is the phase that fails.
    assert caught.value.phase == ("export" if passes else phase)
    assert caught.value.exit_code == ExitCode.CHECKPOINT


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.release] if name in PLAYED_BY_OTHERS else []) for name in RECIPES]
)
def test_a_shipped_recipe_rehearses(recipe, tmp_path):
    spec, _ = resolved(f"recipe={recipe}")
    rehearsal = Rehearsal(shrink(spec).spec, tmp_path, train_forked)
    rehearsal.play()
    assert [phase.name for phase in rehearsal.passed] == PHASES


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("data.train_prefix=/none/a", "data.split='90,5,5'", "tokenizer.path=/none/t.json"),
        ("data.blend=[0.7 /none/a,0.3 /none/b]", "data.validation_prefix=/none/c", "tokenizer.path=/none/t.json"),
        ("data.sft_data=/none/chats.jsonl", "tokenizer.path=/none/t.json"),
        ("data.train_prefix=/none/a", "data.fim_rate=0.5", "tokenizer.path=/none/t.json"),
        (
            "data.corpus=/none",
            "data.reset_attention_mask=true",
            "data.reset_position_ids=true",
            "data.eod_mask_loss=true",
        ),
    ],
    ids=["split", "blend", "chat", "fim", "packed"],
)
def test_every_form_of_data_rehearses(overrides, tmp_path):
    rehearsal = Rehearsal(small_spec("recipe=llama_tiny", "model.vocab_size=300", *overrides), tmp_path, train_forked)
    rehearsal.play()
    assert len(rehearsal.passed) == len(PHASES)
    data = RunDirectory(Path(tmp_path) / "train")
    assert data.spec.is_file()
