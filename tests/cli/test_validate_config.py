"""`megalaunch validate-config`, `recipes` and the command itself, run as a user runs them."""

import json
import subprocess
import sys
import time

import pytest
import yaml
from made_specs import LAPTOP
from slow_cases import slow_but
from typer.testing import CliRunner

import megalaunch
from megalaunch.cli.app import COMMANDS, app

run = CliRunner()


def validate(*overrides):
    return run.invoke(app, ["validate-config", *overrides])


TWICE_ONE_NODE = ("parallel=tp4pp4", "cluster.nodes=1")


@pytest.mark.parametrize("overrides", [("recipe=llama3_8b", *TWICE_ONE_NODE), (*TWICE_ONE_NODE, "recipe=llama3_8b")])
def test_tp4pp4_on_one_machine_is_exactly_one_error_with_its_fix(overrides):
    result = validate(*overrides)
    assert result.exit_code == 2
    assert result.output.count("error: ") == 1
    assert "the world has 8 devices (1 x 8); the layout needs 16 (tp 4 x pp 4)" in result.output
    assert "fix:  cluster.nodes=2" in result.output
    assert result.output.rstrip().endswith("1 error, 1 warning")
    fixed = validate(*[word for word in overrides if word != "cluster.nodes=1"], "cluster.nodes=2")
    assert fixed.exit_code == 0
    assert fixed.output.rstrip().endswith("valid, 1 warning")


def test_llama3_70b_by_three_and_seven_has_five_errors_each_with_fixes():
    result = validate("recipe=llama3_70b", "parallel=tp3pp7", "cluster.nodes=8", "--json")
    report = json.loads(result.output)
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    assert (result.exit_code, report["valid"]) == (2, False)
    assert {(f["rule"], f["message"].partition(" (")[0]) for f in errors} == {
        ("parallel.world", "the world has 64 devices"),
        ("parallel.layers_by_pp", "80 layers are not divisible by pp 7"),
        ("parallel.heads_by_tp", "heads 64 is not divisible by tp 3"),
        ("parallel.groups_by_tp", "neither num_query_groups 8 nor tp 3 is divisible by the other"),
        ("parallel.ffn_by_tp", "ffn_hidden_size 28672 is not divisible by tp 3"),
    }
    assert all(f["fixes"] for f in errors)
    assert all(f["origin"] for f in errors)
    text = validate("recipe=llama3_70b", "parallel=tp3pp7", "cluster.nodes=8").output
    for finding in errors:
        assert f"why:  megalaunch explain {finding['rule']}\n" in text


def test_derived_values_of_a_pipeline():
    report = json.loads(validate("recipe=llama31_405b", "cluster.nodes=128", "--json").output)
    expected = {"stages": 64, "layers_per_stage": [1, *[2] * 62, 1], "dp": 8, "microbatches": 192,
                "padded_vocab_size": 129_024, "bubble": 0.0045}  # fmt: skip
    assert report["derived"] | expected == report["derived"]
    assert json.loads(validate("recipe=deepseek_v3", "--json").output)["derived"]["expert_dp"] == 1


KEYS = [("stepz", "train.steps"), ("topk", "model.moe.top_k"), ("vocab", "model.vocab_size"), ("lr", "optimizer.lr")]


@pytest.mark.parametrize(
    ("name", "key"),
    slow_but(KEYS, KEYS[3]),
)
def test_a_key_without_its_section_is_understood(name, key):
    assert f"did you mean {key!r}?" in validate("recipe=tiny", f"{name}=5").output
    assert "did you mean" not in validate("recipe=tiny", "qqqq=5").output


def test_train_tells_that_a_format_is_emulated(monkeypatch, tmp_path):
    monkeypatch.setattr("megalaunch.platform.detect.detect_machine", lambda: LAPTOP)
    overrides = ["recipe=tiny", "data.corpus=x", "precision=bf16", f"run.directory={tmp_path}/run"]
    assert "[precision.native]" in run.invoke(app, ["train", "--dry-run", *overrides]).output


def test_json_holds_all_of_it():
    result = validate("recipe=llama3_8b", "parallel=tp3pp7", "cluster.nodes=1", "--json")
    report = json.loads(result.output)
    assert (result.exit_code, report["valid"]) == (2, False)
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    assert {f["rule"] for f in errors} == {
        "parallel.world",
        "parallel.layers_by_pp",
        "parallel.ffn_by_tp",
        "parallel.heads_by_tp",
        "parallel.groups_by_tp",
    }
    assert set(errors[0]) == {"rule", "severity", "path", "origin", "message", "numbers", "fixes"}
    assert all(f["fixes"] for f in errors)
    right = json.loads(validate("--json", "recipe=quickstart", "cluster.cpu_workers=2", "platform=cpu").output)
    assert right["valid"] is True
    assert right["derived"] | {"dp": 2, "parameters": 5_048_576, "microbatches": 1} == right["derived"]
    assert {f["rule"] for f in right["findings"]} == {"derived"}


def test_overrides_that_do_not_compose_are_findings_too():
    result = validate("recipe=quickstart", "train.stepps=3", "--json")
    (finding,) = json.loads(result.output)["findings"]
    assert (result.exit_code, finding["path"], finding["origin"]) == (2, "train.stepps", "command line")
    text = validate("recipe=quickstart", "train.stepps=3", "modell=tiny", "optimizer.lr=fast")
    assert text.exit_code == 2
    assert "did you mean 'train.steps'" in text.output
    assert "did you mean 'model'" in text.output
    assert "must be a number, got 'fast'" in text.output
    assert text.output.endswith("\n\n3 errors; the rules are checked once they are corrected\n")


@pytest.mark.parametrize("other", [("--explain", "train.steps"), ("--cfg", "job"), ("--info", "all")])
def test_json_is_of_findings_alone(other):
    result = run.invoke(app, ["validate-config", "recipe=tiny", "--json", *other])
    assert (result.exit_code, "--json shows findings; it cannot be combined" in result.output) == (2, True)


def test_recipes_with_names_that_cannot_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/my run.yaml").write_text("# @package _global_\ndefaults:\n  - tiny\n  - _self_\n")
    result = run.invoke(app, ["validate-config", "recipe=my run", "--json"])
    [finding] = json.loads(result.output)["findings"]
    assert finding["message"] == (
        "there is no recipe 'my run': a name has letters, digits, '_', '.' and '-'; rename the file, or give its path: "
        "'recipe=recipes/my run.yaml'"
    )
    assert "my run" not in run.invoke(app, ["recipes", "list"]).output


def test_the_sizes_of_a_chip_are_named():
    assert (
        "did you mean 'a100_40gb' or 'a100_80gb' or 'a100_pcie_40gb'" in validate("recipe=tiny", "platform=a100").output
    )


def test_explain_a_value():
    result = validate("recipe=llama3_8b", "--explain", "optimizer.lr")
    assert result.exit_code == 0
    assert result.output.startswith("optimizer.lr = 0.0003\n")
    assert "llama3_8b.yaml:15:3" in result.output
    assert validate("recipe=llama3_8b", "--explain", "optimizer.lrr").exit_code == 2


def test_no_overrides_at_all():
    result = validate()
    assert result.exit_code == 2
    assert "recipe=quickstart" in result.output


def test_version_help_and_an_unknown_command():
    assert run.invoke(app, ["--version"]).output == f"megalaunch {megalaunch.__version__}\n"
    text = run.invoke(app, ["--help"]).output
    for name, entry in COMMANDS.items():
        assert f"  {name}" in text
        assert entry.help in text  # not cut off at 80 columns
    unknown = run.invoke(app, ["validat-config"])
    assert unknown.exit_code == 2
    assert "No such command 'validat-config'" in unknown.output


@pytest.mark.parametrize("name", [*COMMANDS, "recipes show"])
def test_every_command_shows_its_own_options(name):
    result = run.invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output
    assert "--help" in result.output


def test_a_command_that_cannot_be_imported_breaks_no_other(monkeypatch):
    monkeypatch.setitem(sys.modules, "megalaunch.cli.train.watch", None)
    assert run.invoke(app, ["--help"]).exit_code == 0
    assert run.invoke(app, ["recipes", "list"]).exit_code == 0
    assert isinstance(run.invoke(app, ["watch", "x"]).exception, ImportError)


HEAVY = ("torch", "numpy", "rich", "tokenizers", "hydra", "matplotlib", "pandas")


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (["--help"], ()),
        (["recipes", "list", "--names"], ()),
        (["recipes", "show", "tiny"], ()),
        (["explain", "train.steps"], ()),
        (["validate-config", "recipe=tiny", "parallel=dp2", "optimizer.lr=1e-3"], ("hydra",)),
    ],
)
def test_what_a_command_imports(overrides, allowed):
    code = (
        f"import sys\nfrom megalaunch.cli.app import app\ntry:\n    app({overrides!r})\nexcept SystemExit:\n    pass\n"
    )
    code += f"print([n for n in {HEAVY!r} if n in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == str(list(allowed))


def test_a_recipe_of_a_megabyte_of_noise_ends_soon(tmp_path):
    import random

    path = tmp_path / "noise.yaml"
    path.write_text("# @package _global_\n" + "".join(random.Random(1).choices("ab{}[]:-\n \"'&*!#|>%@", k=1_000_000)))
    began = time.process_time()
    result = validate(f"recipe={path}")
    assert time.process_time() - began < 2
    assert result.exit_code == 2
    assert "bytes long" in result.output


def test_hydras_own_views(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = tmp_path / "sha'red"
    (shared / "schedule").mkdir(parents=True)
    (shared / "schedule" / "team.yaml").write_text("shape: linear\n")
    job = validate("recipe=tiny", "train.steps=7", "run.name=a, b", "--cfg", "job")
    data = yaml.safe_load(job.output)
    assert (job.exit_code, data["train"]["steps"], data["run"]["name"]) == (0, 7, "a, b")
    tree = subprocess.run(
        [sys.executable, "-m", "megalaunch", "train", "recipe=qwen3_tiny", "parallel=tp2", "schedule=team", "--info",
         "defaults-tree", "-cd", str(shared)], capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert "    parallel: tp2\n" in tree
    assert "    recipe: qwen3_tiny:\n      recipe/tiny:\n" in tree
    assert "    schedule: team\n" in tree
    refused = validate("recipe=tiny", "train.stepz=3", "--info", "searchpath")
    assert (refused.exit_code, "did you mean 'train.steps'" in refused.output) == (2, True)


def test_multirun_is_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run.invoke(app, ["train", "-m", "recipe=tiny", "data.mock=true", "optimizer.lr=1e-3,1e-4", "--dry-run"])
    same = run.invoke(app, ["sweep", "recipe=tiny", "data.mock=true", "optimizer.lr=1e-3,1e-4", "--dry-run"])
    assert (result.exit_code, result.output) == (same.exit_code, same.output)
    assert "optimizer.lr=0.001" in result.output or "1e-3" in result.output
