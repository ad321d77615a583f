"""`megalaunch recipes list|show|diff`."""

import json
import shutil
import sys

import pytest
from typer.testing import CliRunner

from megalaunch.cli.recipes import index
from megalaunch.cli.recipes.compose_rows import compose_rows
from megalaunch.cli.recipes.index import list_rows, packaged_recipes
from megalaunch.cli.recipes.recipes import app
from megalaunch.cli.recipes.table import RecipeRow
from megalaunch.config import groups
from megalaunch.schema.yaml_file import load_yaml

RUNNER = CliRunner()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGALAUNCH_RECIPES", raising=False)
    return tmp_path


def run(*arguments):
    return RUNNER.invoke(app, list(arguments))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n# A recipe of a test.\n{text}")


def test_list_says_size_devices_and_layout(folder):
    result = run("list")
    assert result.exit_code == 0
    lines = {line.split()[0]: " ".join(line.split()) for line in result.stdout.splitlines()}
    assert lines["recipe"] == "recipe parameters devices layout sequence description"
    assert lines["llama3_70b"].startswith("llama3_70b 70.6B 32 h100 tp4 pp4 vpp5 cp2 sp 8192 Llama-3 70B")
    assert lines["mixtral_8x7b"].startswith("mixtral_8x7b 46.7B, 12.9B active 32 h100 pp4 vpp8 ep8 4096 Mixtral")
    assert lines["deepseek_v3"].startswith("deepseek_v3 671B, 37.6B active 1024 h100 tp2 pp16 ep64 sp uneven stages")
    assert lines["quickstart"].startswith("quickstart 5.05M any 256 A small Llama")
    assert lines["tiny"].startswith("tiny 39.1K any 32 A toy Llama")
    assert all(line == line.rstrip() for line in result.stdout.splitlines())
    assert "from: " in result.stderr


def test_names_alone_need_no_composition(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "megalaunch.config.compose", None)  # importing it raises ImportError
    names = run("list", "--names").stdout.split()
    assert {"tiny", "llama3_8b"} <= set(names)
    assert json.loads(run("list", "--names", "--json").stdout) == names


def test_rows_of_many_recipes_read_each_option_file_once(folder, monkeypatch):
    read = []
    monkeypatch.setattr(groups, "load_yaml", lambda path, shown: read.append(path) or load_yaml(path, shown))
    files = {name: path for name, path in packaged_recipes().items() if name.startswith("llama")}
    assert all(row.parameters for row in compose_rows(files))
    assert len(read) == len(set(read)) > 10


def composed_names(monkeypatch):
    """Return a list that gets the name of every recipe that a list composes."""
    names = []

    def compose(files):
        names.extend(files)
        return [RecipeRow(name, "composed") for name in files]

    monkeypatch.setattr("megalaunch.cli.recipes.compose_rows.compose_rows", compose)
    return names


def test_a_list_composes_only_recipes_of_the_user(folder, monkeypatch):
    names = composed_names(monkeypatch)
    write(folder / "conf/model/mine.yaml", "num_layers: 2\n")
    write(folder / "recipes/mine.yaml", "defaults:\n  - tiny\n  - _self_\n")
    rows = list_rows()
    assert names == ["mine"]
    assert [row.name for row in rows] == sorted([*packaged_recipes(), "mine"])
    assert [row.name for row in rows if row.summary == "composed"] == ["mine"]


def test_packaged_recipes_alone_need_no_hydra(folder, monkeypatch):
    for module in ("hydra", "omegaconf", "megalaunch.config.compose"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    assert run("list").exit_code == 0


@pytest.mark.parametrize("own", ["recipes/llama3_8b.yaml", "conf/model/llama3_8b.yaml", "conf/parallel/tp4.yaml"])
def test_a_file_that_changes_a_packaged_recipe_has_all_composed(folder, monkeypatch, own):
    names = composed_names(monkeypatch)
    write(folder / own, "defaults:\n  - _self_\n")
    assert {row.summary for row in list_rows()} == {"composed"}
    assert set(names) == set(packaged_recipes())


@pytest.mark.parametrize("changed", ["PACKAGED", "CONF", "_SCHEMA"])
def test_an_index_of_other_files_is_not_used(folder, monkeypatch, changed):
    copy = shutil.copytree(getattr(index, changed), folder / "copy")
    first = min(path for path in copy.rglob("*.*") if path.suffix in (".yaml", ".py"))
    monkeypatch.setattr(index, changed, copy)
    assert index.indexed_rows()  # the same bytes elsewhere
    first.write_text(first.read_text() + "\n")
    assert index.indexed_rows() == {}


@pytest.mark.parametrize("text", [None, "", "[]", '{"rows": []}'])
def test_an_unreadable_index_is_not_used(folder, monkeypatch, text):
    names = composed_names(monkeypatch)
    monkeypatch.setattr(index, "INDEX", folder / "recipes.json")
    if text is not None:
        (folder / "recipes.json").write_text(text)
    list_rows()
    assert set(names) == set(packaged_recipes())


def test_list_as_json(folder):
    rows = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    assert rows["llama3_8b"] == {
        "name": "llama3_8b",
        "summary": "Llama-3 8B pre-training at sequence 8192 on H100.",
        "model": "llama3_8b",
        "parameters": 8_030_261_248,
        "active": None,
        "devices": 8,
        "chip": "h100",
        "layout": "cp2 zero3",
        "sequence_length": 8192,
        "micro_batch_size": 1,
        "global_batch_size": 128,
        "problem": "",
    }
    assert rows["mixtral_8x7b"]["active"] == 12_879_925_248
    assert rows["tiny"]["devices"] is None


def test_a_recipe_that_does_not_compose_is_listed_with_its_problem(folder):
    write(folder / "recipes/wrong.yaml", "defaults:\n  - tiny\n  - _self_\ntrain:\n  step: 3\n")
    write(folder / "recipes/right.yaml", "defaults:\n  - tiny\n  - _self_\ntrain:\n  steps: 3\n")
    result = run("list")
    lines = {line.split()[0]: " ".join(line.split()) for line in result.stdout.splitlines()}
    assert result.exit_code == 0
    assert lines["wrong"] == "wrong does not compose: unknown key; did you mean 'train.steps'?"
    assert lines["right"] == "right 39.1K any 32 A recipe of a test."


def test_show_prints_the_file_or_the_whole_run(folder):
    assert run("show", "llama3_8b").stdout.startswith("# @package _global_\n# Llama-3 8B pre-training")
    whole = run("show", "llama3_8b", "--composed").stdout
    assert "data_sharding: optim_grads_params" in whole
    assert "momentum: 0.95" in whole
    write(folder / "mine.yaml", "defaults:\n  - tiny\n  - _self_\n")
    assert run("show", "./mine.yaml").stdout == (folder / "mine.yaml").read_text()


def test_diff_shows_what_differs_in_the_resolved_runs(folder):
    write(folder / "recipes/child.yaml", "defaults:\n  - llama3_8b\n  - override /parallel: tp2\n  - _self_\n")
    result = run("diff", "llama3_8b", "child")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["key", "llama3_8b", "child"],
        ["parallel.tp", "1", "2"],
        ["parallel.cp", "2", "1"],
        ["parallel.data_sharding", "optim_grads_params", "optim"],
    ]


def test_diff_compares_derived_values_too(folder):
    write(folder / "recipes/longer.yaml", "defaults:\n  - llama3_8b\n  - _self_\ntrain:\n  steps: 15001\n")
    report = json.loads(run("diff", "llama3_8b", "longer", "--json").stdout)
    assert (report["left"], report["right"]) == ("llama3_8b", "longer")
    assert report["differences"] == [
        {"key": "data.num_samples", "left": 1_920_000, "right": 1_920_128},
        {"key": "schedule.decay_steps", "left": 15000, "right": 15001},
        {"key": "train.steps", "left": 15000, "right": 15001},
    ]


def test_diff_of_equal_recipes(folder):
    write(folder / "recipes/same.yaml", "defaults:\n  - tiny\n  - _self_\n")
    assert run("diff", "tiny", "same").stdout == "tiny and same give the same run\n"
    assert json.loads(run("diff", "tiny", "same", "--json").stdout)["differences"] == []


@pytest.mark.parametrize("arguments", [("diff", "tiny", "tinny"), ("diff", "tinny", "tiny"), ("show", "tinny")])
def test_a_recipe_that_is_not_there(folder, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "there is no recipe 'tinny'; did you mean 'tiny'?" in " ".join(result.output.split())
