"""Usage errors: another program's options and command names are answered with what to type."""

import re
import shlex

import pytest
from slow_cases import slow_but
from typer.testing import CliRunner

from megalaunch.cli.app import COMMANDS, app
from megalaunch.cli.usage_errors import next_step
from megalaunch.importers.megatron.arguments import known_flags
from megalaunch.importers.megatron.spelling import translate

run = CliRunner()


def invoke(*arguments):
    """The exit code, and the message with its lines joined."""
    result = run.invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("command", ["train", "validate-config", "plan", "sweep"])
def test_all_megatron_flags_are_answered_at_once(command):
    flags = ["--tensor-model-parallel-size", "4", "--num_layers=8", "--swiglu", "--use-flash-attn", "--frobnicate"]
    code, text = invoke(command, "recipe=quickstart", *flags)
    assert code == 2
    assert "--tensor-model-parallel-size 4 write parallel.tp=4" in text
    assert "--num_layers 8 write model.num_layers=8" in text
    assert "--swiglu write model.activation=swiglu" in text
    assert "--use-flash-attn leave it out: " in text
    assert "--frobnicate unknown to Megatron-LM too" in text
    assert "`megalaunch import-megatron SCRIPT`" in text


def test_settings_typed_as_options():
    code, text = invoke("train", "--recipe", "quickstart", "--train.steps", "5", "--dryrun", "--config-file=a b.yaml")
    assert code == 2
    assert "--recipe quickstart write recipe=quickstart" in text
    assert "--train.steps 5 write train.steps=5" in text
    assert "--dryrun did you mean --dry-run?" in text
    assert "write 'recipe=a b.yaml'" in text
    assert invoke("validate-config", "recipe=tiny", "--explain", "train.steps")[0] == 0


def test_every_flag_that_import_megatron_maps_has_an_answer():
    for flag in known_flags():
        assert translate(flag, ["2"]) is not None, flag
    assert translate("frobnicate") is None
    assert translate("num-query-groups", ["8"]).overrides == ("model.num_query_groups=8",)
    assert translate("sequence-parallel").overrides == ("parallel.sequence_parallel=true",)
    assert translate("sequence-parallel", ["false"]).overrides == ("parallel.sequence_parallel=VALUE",)
    assert translate("data-path", ["0.5", "a", "0.5", "b"]).overrides == ("data.blend=['0.5 a','0.5 b']",)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian", "recipe=quickstart"], "megalaunch train recipe=quickstart"),
        (["validate", "recipe=tiny"], "megalaunch validate-config recipe=tiny"),
        (["import_megatron", "a b.sh"], "megalaunch import-megatron 'a b.sh'"),
        (["recipe=tiny", "train.steps=3"], "megalaunch train recipe=tiny train.steps=3"),
        (["quickstart"], "megalaunch train recipe=quickstart"),
        (["./mine.yaml"], "megalaunch train recipe=./mine.yaml"),
        (["resume", "recipe=tiny"], "megalaunch train recipe=tiny"),
        (["version"], "megalaunch --version"),
        (["deploy", "runs/a"], "megalaunch serve runs/a"),
    ],
)
def test_a_similar_command_is_suggested(arguments, meant):
    assert next_step(arguments, list(COMMANDS)) == f"Did you mean '{meant}'?"
    code, text = invoke(*arguments)
    assert (code, f"Did you mean '{meant}'?" in text) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["data", "mrge"], "Did you mean 'merge'?"),
        (["convert", "exprot"], "Did you mean 'export'?"),
        (["checkpoint", "verfy"], "Did you mean 'verify'?"),
        (["generate", "runs/x", "--max-tokens", "5"], "--max-new-tokens"),
    ],
)
def test_a_similar_subcommand_or_option_is_suggested(arguments, meant):
    code, text = invoke(*arguments)
    assert (code, meant in text) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["runs/one"], "convert export runs/one --output HF_DIR"),
        (["run", "--output", "out"], "convert export run --output out"),
        (["hf"], "convert import hf --output CHECKPOINT"),
        (["hf://org/name"], "convert import hf://org/name --output CHECKPOINT"),
    ],
)
def test_the_conversion_of_a_path_is_named(tmp_path, monkeypatch, arguments, meant):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "hf"):
        (tmp_path / name).mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    result = CliRunner().invoke(app, ["convert", *arguments])
    assert result.exit_code == 2
    assert f"Did you mean 'megalaunch {meant}'?" in result.stderr


@pytest.mark.parametrize("arguments", [["convert", "RUN"], ["convert", "RUN", "--output", "out"], ["convert", "qqqq"]])
def test_the_commands_of_a_group_are_named_where_none_is_near(arguments):
    code, text = invoke(*arguments)
    assert (code, "The commands are: import, export, import-megatron, upcycle." in text) == (2, True)


def test_an_unknown_command_is_told_how_to_list_commands():
    assert "'megalaunch --help' lists the commands" in invoke("qqqq")[1]


@pytest.mark.parametrize("arguments", [["-h"], ["help"], ["train", "-h"], ["help", "train"], ["help", "data", "merge"]])
def test_help_by_other_names(arguments):
    code, text = invoke(*arguments)
    assert code == 0
    assert text.startswith("Usage: ")
    assert ("--dry-run" in text) == ("train" in arguments)
    assert ("PREFIXES" in text.upper()) == ("merge" in arguments)


@pytest.mark.parametrize("command", ["validate-config", "plan"])
def test_a_repeated_key_is_a_warning(command):
    code, text = invoke(command, "recipe=quickstart", "train.steps=30", "train.steps=60")
    assert code == 0
    assert "warning: train.steps" in text
    assert "is set 2 times (30, 60); the last applies: train.steps=60" in text
    again = invoke(command, "recipe=quickstart", "train.steps=60", "train.steps=60")[1]
    assert "is given" not in again


@pytest.mark.parametrize(
    "key", slow_but(["data.corpus", "tokenizer.path", "checkpoint.load_pretrained"], "data.corpus")
)
def test_names_on_hubs_are_distinguished_from_paths(key):
    assert "hf://" in invoke("validate-config", "recipe=quickstart", f"{key}=nobody/Nothing-7B")[1]
    assert "hf://" not in invoke("validate-config", "recipe=quickstart", f"{key}=nothing")[1]


def test_train_warns_of_a_repeated_key(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    corpus = f"data.corpus={tmp_path}/text.txt"
    text = invoke("train", "--dry-run", "recipe=tiny", corpus, "train.steps=30", "train.steps=60")[1]
    assert "the last applies: train.steps=60" in text


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["preprocess"], ["INPUTS", "--output-prefix OUTPUT_PREFIX", "--tokenizer TOKENIZER"]),
        (["preprocess", "a.txt"], ["--output-prefix OUTPUT_PREFIX", "--tokenizer TOKENIZER"]),
        (["preprocess", "--input", "a.txt"], ["--output-prefix OUTPUT_PREFIX", "--tokenizer TOKENIZER"]),
        (["convert", "import"], ["HF_DIR", "--output CHECKPOINT"]),
        (["data", "merge"], ["PREFIXES", "--output-prefix OUTPUT_PREFIX"]),
        (["tokenizer", "train"], ["INPUTS", "--output OUTPUT"]),
    ],
)
def test_all_missing_parameters_are_reported_at_once(arguments, missing):
    code, text = invoke(*arguments)
    assert code == 2
    assert f"{len(missing)} parameters are missing:" in text
    assert text.endswith(" ".join(missing))  # the whole command, to copy
    assert invoke(*arguments, "--help")[0] == 0


@pytest.mark.parametrize("name", [None, "own text.txt"])
def test_preprocess_without_arguments_shows_commands_that_work_here(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name:
        (tmp_path / name).write_text("some words\n" * 99)
    shown = run.invoke(app, ["preprocess"]).output
    commands = [shlex.split(line) for line in shown.splitlines() if line.startswith("  megalaunch ")]
    assert [command[1] for command in commands] == ["tokenizer", "preprocess"]
    for command in commands:
        code, text = invoke(*command[1:])
        assert code == 0, text
        assert name is None or name in command
    assert "tokenizer train" not in run.invoke(app, ["preprocess"]).output  # there is one now


def test_a_sweep_without_arguments_says_all_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = invoke("sweep")
    assert code == 2
    assert "no override has several values" in text
    assert "no recipe is given" in text
    example = re.search(r"megalaunch sweep (recipe=quickstart \S+ \S+)", text)
    assert example
    assert invoke("sweep", *example[1].split(), "--dry-run")[0] == 0


def test_a_branch_without_a_recipe_is_told_where_its_settings_are():
    code, text = invoke("train", "--from", "runs/a@20", "run.name=b")
    assert (code, "not its settings; type those of its overrides.txt" in text) == (2, True)


@pytest.mark.parametrize("command", [("validate-config",), ("train",), ("plan",), ("sweep", "--dry-run")])
def test_every_command_says_that_rules_wait_for_right_keys(command):
    """tp=3 breaks rules of the tiny model, which are not checked before the key is known."""
    wrong = [*command, "recipe=tiny", "data.mock=true", "parallel.tp=3", "optimizer.lr=1e-3,2e-3"]
    if command[0] != "sweep":
        wrong.pop()
    code, text = invoke(*wrong, "train.stepps=3")
    assert (code, "parallel.heads_by_tp" in text) == (2, False)
    assert "train.stepps" in text
    assert "the rules are checked once it is corrected" in text
    assert "the rules are checked once they are corrected" in invoke(*wrong, "train.stepps=3", "train.steps=x")[1]
    assert "the rules are checked" not in invoke(*wrong)[1]


def test_errors_come_before_warnings(tmp_path):
    wrong = ["recipe=tiny", "data.mock=true", "parallel.tp=3", "optimizer.lr=9", f"run.directory={tmp_path}/run"]
    for command in (["train"], ["validate-config"]):
        text = invoke(*command, *wrong, f"checkpoint.branch_from={tmp_path}/none")[1]
        assert text.rindex(" error: ") < text.index("warning: optimizer.lr"), command
