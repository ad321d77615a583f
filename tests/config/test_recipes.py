import os

import pytest
from slow_cases import slow_but

from megalaunch.config.compose import Composer, compose
from megalaunch.config.errors import ConfigError
from megalaunch.config.groups import CONF, load_option, option_names
from megalaunch.config.keys import GROUPS
from megalaunch.config.recipes import find_recipe, read_summary, recipe_files

HEADER = "# @package _global_\n# A test recipe.\n"
PARENT = "defaults:\n  - tiny\n  - _self_\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGALAUNCH_RECIPES", raising=False)
    return tmp_path


def write(path, text, header=HEADER):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + text)


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    "path", slow_but(["./mine.yaml", "mine.yaml", "sub/a b.yml", "{folder}/mine.yaml"], "./mine.yaml", "sub/a b.yml")
)
def test_a_recipe_by_path(folder, path):
    path = path.format(folder=folder)
    write(folder / path, PARENT + "train: {steps: 33}\n")
    spec = compose([f"recipe={path}", "parallel=tp2"]).spec
    assert (spec.train.steps, spec.parallel.tp, spec.model.name) == (33, 2, "tiny")


def test_names_are_found_here_and_in_the_variable_and_may_have_folders(folder, monkeypatch):
    write(folder / "recipes/here.yaml", PARENT + "train: {steps: 1}\n")
    write(folder / "recipes/twice.yaml", PARENT + "train: {steps: 2}\n")
    write(folder / "more/twice.yaml", PARENT + "train: {steps: 3}\n")
    write(folder / "more/team/x.yaml", PARENT + "train: {steps: 4}\n")
    monkeypatch.setenv("MEGALAUNCH_RECIPES", os.pathsep.join(["more", "missing"]))
    steps = {name: compose([f"recipe={name}"]).spec.train.steps for name in ("here", "twice", "team/x")}
    assert steps == {"here": 1, "twice": 3, "team/x": 4}
    assert {"here", "team/x", "tiny", "quickstart"} <= set(recipe_files())
    assert read_summary(recipe_files()["here"]) == "A test recipe."


def test_a_child_wins_over_its_parents(folder):
    write(folder / "recipes/parent.yaml", "defaults:\n  - llama3_8b\n  - override /parallel: tp4\n  - _self_\n"
          "train: {steps: 5, seed: 6}\n")  # fmt: skip
    write(folder / "recipes/child.yaml", "defaults:\n  - parent\n  - override /parallel: tp8\n  - _self_\n"
          "train: {steps: 9}\n")  # fmt: skip
    composition = compose(["recipe=child"])
    spec = composition.spec
    assert (spec.train.steps, spec.train.seed, spec.parallel.tp, spec.model.num_layers) == (9, 6, 8, 32)
    assert composition.origins["train.steps"].where == "recipes/child.yaml:7:9"
    assert composition.origins["train.seed"].where == "recipes/parent.yaml:7:19"
    assert compose(["recipe=child", "parallel=pp2"]).spec.parallel.tp == 1


def test_of_two_parents_the_later_wins_and_a_common_ancestor_counts_once(folder):
    write(
        folder / "recipes/left.yaml", "defaults:\n  - tiny\n  - override /parallel: tp2\ntrain: {steps: 1, seed: 1}\n"
    )
    write(folder / "recipes/right.yaml", "defaults:\n  - tiny\n  - override /parallel: pp2\ntrain: {steps: 2}\n")
    write(folder / "recipes/both.yaml", "defaults:\n  - left\n  - right\n")
    spec = compose(["recipe=both"]).spec
    assert (spec.train.steps, spec.train.seed, spec.parallel.tp, spec.parallel.pp) == (2, 1, 1, 2)


def test_all_faults_of_a_recipe_come_at_once_with_line_and_column(folder):
    write(folder / "bad.yaml", "defaults:\n  - tiny\n  - override /modell: tiny\n  - override model: tiny\n"
          "  - parallel: tp2\n  - override /platform: h1000\n  - 3\n  - _self_\n"
          "train:\n  stepps: 3\n  seed: {a: 1}\ntrian: 5\nmodel: tiny\n"
          "batch:\n  global_batch_size: eight\n")  # fmt: skip
    found = {problem.where: problem.message for problem in problems("recipe=bad.yaml")}
    assert found["bad.yaml:5:5"].startswith("there is no config group 'modell'; did you mean 'model'")
    assert found["bad.yaml:6:5"] == "write `- override /model: tiny`"
    assert found["bad.yaml:7:5"] == "write `- override /parallel: tp2`"
    assert found["bad.yaml:8:5"].startswith("there is no platform=h1000; did you mean 'h100'")
    assert found["bad.yaml:9:5"].startswith("an entry must be `- override /GROUP: OPTION`")
    assert found["bad.yaml:12:3"] == "unknown key; did you mean 'train.steps'?"
    assert found["bad.yaml:13:3"] == "must be a single value, not a list or a mapping"
    assert found["bad.yaml:14:1"] == "unknown key; did you mean 'train'?"
    assert found["bad.yaml:15:1"].endswith("`- override /model: tiny`")
    assert found["bad.yaml:17:3"] == "must be an integer, got 'eight' (str)"
    assert len(found) == 10


FORBIDDEN = [
    (PARENT, "# no header\n", "first line of a recipe must be `# @package _global_`"),
    ("defaults:\n  - _self_\n  - tiny\n", HEADER, "_self_ must be the last"),
    ("defaults: tiny\n", HEADER, "defaults must be a list"),
    ("defaults:\n  - ../secret\n", HEADER, "name other recipes, not paths: '../secret'"),
    ("defaults:\n  - /etc/x.yaml\n", HEADER, "name other recipes, not paths"),
    ("defaults:\n  - tinny\n", HEADER, "there is no recipe 'tinny'; did you mean 'tiny'"),
    ("defaults:\n  - override /parallel: 3\n", HEADER, "must be the name of an option"),
    ("a: [1\n", HEADER, "is not valid YAML"),
    ("run: {name: '${oc.env:AWS_SECRET}'}\n", HEADER, "must not read the environment variable AWS_SECRET"),
    ("run: {name: '${hydra:job.name}'}\n", HEADER, "supported are ${SECTION.KEY}"),
    ("run: {_target_: os.system}\n", HEADER, "'_target_' is not supported"),
    ("hydra: {run: {dir: /tmp}}\n", HEADER, "unknown key"),
]


@pytest.mark.parametrize(
    ("text", "header", "message"),
    slow_but(FORBIDDEN, *FORBIDDEN[::3]),
)
def test_what_a_recipe_may_not_hold(folder, text, header, message):
    write(folder / "bad.yaml", text, header)
    found = problems("recipe=bad.yaml")
    assert any(message in problem.message for problem in found), found
    assert all(problem.where.startswith("bad.yaml") for problem in found)


def test_a_recipe_that_starts_from_itself(folder):
    write(folder / "recipes/a.yaml", "defaults:\n  - b\n")
    write(folder / "recipes/b.yaml", "defaults:\n  - a\n")
    message = "inherits from itself: a -> b -> a; remove 'a' from the defaults of recipes/b.yaml"
    assert [p.message for p in problems("recipe=a")] == [message]


def test_a_recipe_that_hides_the_one_it_means_to_start_from(folder):
    write(folder / "recipes/tiny.yaml", "defaults:\n  - tiny\n")
    (problem,) = problems("recipe=tiny")
    assert "or rename recipes/tiny.yaml, which hides megalaunch's own recipe tiny" in problem.message


def test_a_chain_that_is_too_long_is_no_circle(folder):
    for number in range(10):
        write(folder / f"recipes/r{number}.yaml", f"defaults:\n  - r{number + 1}\n")
    (problem,) = problems("recipe=r0")
    assert "inherits from itself" not in problem.message
    assert "more than 8 recipes: r0 -> r1" in problem.message


@pytest.mark.parametrize("entry", ["tiny", "recipe: tiny", "/recipe: tiny", "override /recipe: tiny"])
@pytest.mark.parametrize("parent_first", slow_but([True, False], True))
def test_a_recipe_may_start_from_one_and_pick_options(folder, entry, parent_first):
    entries = [f"  - {entry}\n", "  - override /model: llama_tiny\n  - override /parallel: tp2\n"]
    write(folder / "mine.yaml", "defaults:\n" + "".join(entries if parent_first else entries[::-1]) + "  - _self_\n")
    spec = compose(["recipe=./mine.yaml"]).spec
    assert (spec.model.name, spec.parallel.tp, spec.train.steps) == (
        "llama_tiny",
        2,
        compose(["recipe=tiny"]).spec.train.steps,
    )


def test_a_missing_path(folder):
    (problem,) = problems("recipe=./no.yaml")
    assert "cannot be read" in problem.message


@pytest.mark.parametrize("key", ["parallel: {tp: 8}", "precision: {compute_dtype: fp32}", "platform: {chip: cpu}"])
def test_a_recipe_that_would_mask_is_refused_with_the_fix(folder, key):
    write(folder / "mask.yaml", f"{PARENT}{key}\n")
    (problem,) = problems("recipe=mask.yaml")
    assert f"- override /{key.partition(':')[0]}:" in problem.message
    assert problem.where.startswith("mask.yaml:6:")


def test_a_typed_option_that_the_recipe_hides_is_refused_unless_the_key_is_typed(folder):
    write(folder / "mask.yaml", f"{PARENT}model: {{num_layers: 3}}\n")
    (problem,) = problems("recipe=mask.yaml", "model=llama3_8b")
    assert (problem.path, problem.where) == ("model.num_layers", "mask.yaml:6:9")
    assert "model.num_layers=32" in problem.message
    spec = compose(["recipe=mask.yaml", "model=llama3_8b", "model.num_layers=32"]).spec
    assert (spec.model.num_layers, spec.model.hidden_size) == (32, 4096)
    assert compose(["recipe=mask.yaml"]).spec.model.num_layers == 3


def test_names_cannot_leave_their_folders(folder):
    write(folder / "secret.yaml", PARENT)
    (folder / "recipes").mkdir()
    assert find_recipe("../secret") is None
    assert "no recipe '../secret'" in problems("recipe=../secret")[0].message


def test_every_option_file_belongs_to_a_group():
    assert {path.parent.name for path in CONF.glob("*/*.yaml")} == set(GROUPS)


@pytest.mark.parametrize(
    ("group", "key"),
    [("optimizer", "name"), ("precision", "compute_dtype"), ("platform", "chip"), ("recompute", "granularity"),
     ("schedule", "shape"), ("launcher", "name")],
)  # fmt: skip
def test_every_option_of_a_group_says_which_it_is(group, key):
    """Else a recipe's own value could hide a typed option: optimizer=adamw would stay the recipe's muon."""
    for option in option_names(group):
        assert f"{group}.{key}" in load_option(group, option, "", []).values, option


def test_a_recipe_of_another_optimizer_does_not_hide_the_typed_one(folder):
    assert compose(["recipe=moonlight_16b"]).spec.optimizer.name == "muon"
    assert compose(["recipe=moonlight_16b", "optimizer=adamw"]).spec.optimizer.name == "adamw"
    write(folder / "mask.yaml", f"{PARENT}optimizer: {{name: muon}}\n")
    (problem,) = problems("recipe=mask.yaml", "optimizer=adamw")
    assert (problem.path, problem.where) == ("optimizer.name", "mask.yaml:6:13")


OPTIONS = {group: option_names(group) for group in GROUPS}
EIGHTHS = [range(start, start + 8) for start in range(0, max(map(len, OPTIONS.values())), 8)]


@pytest.mark.parametrize("places", slow_but(EIGHTHS, EIGHTHS[0], every=EIGHTHS[1:4]), ids=str)
def test_every_option_composes_and_is_told_in_a_comment(places):
    """The first option of each group together, then the second ones; a short group begins again."""
    composer = Composer()
    for place in places:
        chosen = {group: options[place % len(options)] for group, options in OPTIONS.items()}
        for group, option in chosen.items():
            assert (CONF / group / f"{option}.yaml").read_text().startswith("# "), option
        data = ["data.corpus=null"] if chosen["data"] != "mock" else []
        overrides = ["recipe=tiny", *(f"{group}={option}" for group, option in chosen.items()), *data]
        assert chosen.items() <= composer.compose(overrides).choices.items()


def test_all_options_but_of_models_are_among_the_daily_ones():
    assert all(len(options) <= EIGHTHS[3].stop for group, options in OPTIONS.items() if group != "model")


@pytest.mark.parametrize("name", ["tp2", "zero3dp2sp", "tp2tp4"])
@pytest.mark.parametrize("beside", slow_but([False, True], False))
def test_a_file_cannot_redefine_a_layout(tmp_path, monkeypatch, name, beside):
    """parallel=tp2 means the same in every folder."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / ("mine" if beside else "")
    (place / "conf" / "parallel").mkdir(parents=True)
    (place / "conf" / "parallel" / f"{name}.yaml").write_text("tp: 8\n")
    (place / "mine.yaml").write_text("# @package _global_\n# Mine.\ndefaults:\n  - tiny\n")
    recipe = f"recipe={place.relative_to(tmp_path) / 'mine.yaml' if beside else 'tiny'}"
    with pytest.raises(ConfigError) as refused:
        compose([recipe if beside else "recipe=tiny", f"parallel={name}"])
    said = [problem.message for problem in refused.value.problems]
    assert any(f"conf/parallel/{name}.yaml is named like a layout" in message for message in said), said


def test_a_recipe_named_without_its_suffix_is_found_in_the_message(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("# @package _global_\n# Mine.\ndefaults:\n  - tiny\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        compose(["recipe=own/mine"])
    assert "; did you mean 'recipe=own/mine.yaml'? (" in refused.value.problems[0].message
