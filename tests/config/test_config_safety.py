"""A configuration file is data: nothing in it runs code, reads the environment, masks what was typed, or takes long."""

from __future__ import annotations

import random
import re
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_cases import slow_but

from megalaunch.config.compose import compose
from megalaunch.config.errors import ConfigError
from megalaunch.schema import SpecError
from megalaunch.schema.spec_file import read_spec
from megalaunch.schema.yaml_file import YamlProblem, load_yaml

HEAD = "# @package _global_\n# made\ndefaults:\n  - override /model: tiny\n  - _self_\n"
BODY = HEAD + "batch: {sequence_length: 8, global_batch_size: 2}\n"
WHOLE = BODY + "train: {steps: 2}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(*overrides):
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert time.process_time() - began < 4  # 2 s on a machine that does nothing else
    return caught.value.problems


LINES = [
    "run: {name: !!python/object/apply:os.system ['touch ran']}",
    "run: {name: !!python/name:os.system }",
    "run: !!python/module:os {}",
    "run: {_target_: os.system, command: touch ran}",
    "run: {_target_: pathlib.Path.touch, _args_: [ran]}",
    "_target_: os.system",
    "run: {name: {_target_: os.system}}",
    "run: {name: '${oc.decode:1}'}",
    'run: {name: \'${eval:__import__("os").system("touch ran")}\'}',
    "run: {name: '${hydra:runtime.cwd}'}",
    "run: {name: '${oc.create:{}}'}",
    "data: {blend: ['${oc.env:SECRET_TOKEN}']}",
    "data: {blend: ['${oc.env:SECRET_TOKEN,x}']}",
    "run: {name: '${oc.env:SECRET_TOKEN}'}",
    "run: {name: 'a${oc.env:HOME}b${oc.env:SECRET_TOKEN}'}",
    "run: {name: '${oc.env:${oc.env:HOME}}'}",
    "run: {name: '${run.directory}', directory: '${oc.env:SECRET_TOKEN}'}",
    "run: {name: '${${train.seed}:SECRET_TOKEN}'}",
    "run: {name: '${oc.select:run.directory}', directory: '${oc.decode:SECRET_TOKEN}'}",
    "run: {'${oc.env:SECRET_TOKEN}': x}",
    "hydra: {run: {dir: x}}",
    "hydra: {searchpath: ['file:///']}",
]


@pytest.mark.parametrize(
    "line",
    slow_but(LINES, *LINES[::3]),
)
def test_nothing_runs_and_nothing_of_the_environment_is_read(folder, monkeypatch, line):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    (folder / "r.yaml").write_text(WHOLE + line + "\n")
    found = problems("recipe=r.yaml")
    assert not (folder / "ran").exists()
    assert all("s3cret" not in str(problem) for problem in found)
    assert any(problem.where.startswith("r.yaml:") for problem in found)


def test_an_option_file_is_held_to_the_same(folder, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    (folder / "r.yaml").write_text(WHOLE.replace("model: tiny", "model: tiny\n  - override /parallel: mine"))
    (folder / "conf" / "parallel").mkdir(parents=True)
    for text, message in (
        ("_target_: os.system\n", "cannot name code"),
        ("pipeline_layout: ${oc.env:SECRET_TOKEN}\n", "must not read the environment variable SECRET_TOKEN"),
        ("model: {num_layers: 3}\n", "unknown key"),
    ):
        (folder / "conf" / "parallel" / "mine.yaml").write_text(text)
        (problem,) = problems("recipe=r.yaml")
        assert message in problem.message
        assert "mine.yaml:1:1" in problem.where


PATHS = ["../secret", "/etc/passwd", "a/../../b", "./x", "..", "~/x", "x.yaml", "a//b", "${oc.env:HOME}"]


@pytest.mark.parametrize("name", slow_but(PATHS, *PATHS[::3]))
def test_a_recipe_names_no_path(folder, name):
    (folder / "secret.yaml").write_text(WHOLE)
    (folder / "recipes").mkdir()
    (folder / "recipes" / "child.yaml").write_text(HEAD.replace("defaults:\n", f"defaults:\n  - '{name}'\n"))
    assert any("recipe" in problem.path for problem in problems("recipe=child"))


OPTIONS = ["../model/tiny", "/etc/passwd", "a/b", "..", "tiny.yaml", "${oc.env:HOME}"]


@pytest.mark.parametrize("option", slow_but(OPTIONS, *OPTIONS[::3]))
def test_an_option_is_a_name(folder, option):
    (folder / "r.yaml").write_text(WHOLE.replace("model: tiny", f"model: '{option}'"))
    assert any("there is no model=" in problem.message for problem in problems("recipe=r.yaml"))
    typed = problems("recipe=tiny", f"model={option}")  # a person may name a Hugging Face folder: these are none
    assert [problem.path for problem in typed] == ["model"]
    assert re.search("there is no model=|is a file; name a|has no config.json", typed[0].message)


@pytest.mark.parametrize("path", ["sub/../r.yaml", "{here}/r.yaml", "./r.yaml"])
def test_a_person_may_type_any_path(folder, path):
    (folder / "sub").mkdir()
    (folder / "r.yaml").write_text(WHOLE)
    assert compose([f"recipe={path.format(here=folder)}"]).spec.train.steps == 2


MASKING = [
    ("recompute: {modules: [mlp]}", "recompute=selective", "recompute.modules", "recompute.modules=[mlp]"),
    ("model: {rope: {theta: 7.0}}", "model=llama3_8b", "model.rope.theta", "model.rope.theta=7.0"),
    ("model: {moe: {num_experts: 3}}", "model=mixtral_8x7b", "model.moe.num_experts", "model.moe.num_experts=3"),
    ("schedule: {shape: linear}", "schedule=wsd", "schedule.shape", "schedule.shape=linear"),
    ("optimizer: {beta2: 0.5}", "optimizer=adamw", "optimizer.beta2", "optimizer.beta2=0.5"),
]


@pytest.mark.parametrize(
    ("line", "typed", "path", "escape"),
    slow_but(MASKING, *MASKING[::3]),
)
def test_a_recipe_that_masks_a_typed_option_is_refused(folder, line, typed, path, escape):
    (folder / "r.yaml").write_text(f"{WHOLE}{line}\n")
    (problem,) = problems("recipe=r.yaml", typed)
    assert problem.path == path
    assert problem.where.startswith("r.yaml:8:")
    assert f"of {typed};" in problem.message
    compose(["recipe=r.yaml", typed, escape])


def test_files_of_ones_own_are_found_beside_the_recipe_and_hide_nothing(folder):
    nest = folder / "nest"
    (nest / "conf" / "parallel").mkdir(parents=True)
    (nest / "conf" / "parallel" / "mine.yaml").write_text("tp: 2\ntp_comm_overlap: true\n")
    (nest / "r.yaml").write_text(WHOLE.replace("model: tiny", "model: tiny\n  - override /parallel: mine"))
    composition = compose(["recipe=nest/r.yaml"])
    assert (composition.spec.parallel.tp, composition.spec.parallel.tp_comm_overlap) == (2, True)
    assert composition.origins["parallel.tp"].where == "parallel=mine, nest/conf/parallel/mine.yaml:1:1"
    assert "there is no parallel=mine" in problems("recipe=tiny", "parallel=mine")[0].message
    (folder / "conf" / "parallel").mkdir(parents=True)
    (folder / "conf" / "parallel" / "here.yaml").write_text("tp: 4\n")
    assert compose(["recipe=tiny", "parallel=here"]).spec.parallel.tp == 4
    (folder / "conf" / "parallel" / "dp.yaml").write_text("tp: 4\n")
    assert "parallel=dp has two files" in problems("recipe=tiny", "parallel=dp")[0].message
    assert "rename your own" in problems("recipe=tiny", "parallel=dp")[0].message


LARGE = {
    "bytes": bytes(random.Random(1).randbytes(1_000_000)),
    "text": WHOLE + "x: " + "y" * 1_000_000,
    "random words": WHOLE + "".join(random.Random(2).choices("ab:-[]{}&*!|>'\"%@`#, \n", k=60_000)),
    "keys": WHOLE + "".join(f"k{i}: 1\n" for i in range(6000)),
    "nearly keys": WHOLE + "optimizer:\n" + "".join(f"  lr{i}: 1\n" for i in range(2000)),
    "list": BODY + "train: {steps: [" + "1," * 30_000 + "]}",
    "legal list": BODY + "data: {blend: [" + "a," * 30_000 + "]}",
    "depth by brackets": BODY + "train: " + "[" * 30_000,
    "depth by braces": BODY + "train: " + "{a: " * 12_000,
    "depth by indent": BODY + "\n".join(" " * depth + "a:" for depth in range(300)),
    "decimal": BODY + "train: {steps: " + "9" * 50_000 + "}",
    "hexadecimal": BODY + "train: {steps: 0x" + "f" * 50_000 + "}",
    "base 60": BODY + "train: {steps: 1" + ":59" * 20_000 + ".5}",
    "exponent": BODY + "train: {steps: 1e999999999}",
    "digits and dots": BODY + "train: {steps: " + "1" * 60_000 + ".}",
    "parents": "# @package _global_\ndefaults:\n" + "".join(f"  - p{i}\n" for i in range(1000)),
    "laughs": "# @package _global_\na: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(30)),
    "questions": "? " * 20_000,
    "dashes": "- " * 20_000,
    "zeros": b"\0" * 60_000,
    "half a character": WHOLE.encode() + b"\xe2\x82",
}


@pytest.mark.parametrize("name", slow_but(LARGE, *list(LARGE)[::3]))
def test_large_and_twisted_files_end_soon_with_their_place(folder, name):
    content = LARGE[name]
    (folder / "r.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    found = problems("recipe=r.yaml")
    assert all(len(str(problem)) < 1500 for problem in found)
    assert any(problem.where.startswith("r.yaml") for problem in found)


def test_a_mark_at_the_start_of_a_file_is_no_part_of_it(folder):
    (folder / "r.yaml").write_bytes(b"\xef\xbb\xbf" + WHOLE.encode())
    assert compose(["recipe=r.yaml"]).spec.train.steps == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("-2.5E+4", -2.5e4), ("1_000", 1000), ("0x10", 16), ("0b11", 3), (".5", 0.5), ("3.", 3.0),
        ("0:512", "0:512"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("-x", "-x"), ("0", 0),
        ("-7", -7), ("~", None), ("1.2.3", "1.2.3"), ("on", True), ("0:512 2B:1024", "0:512 2B:1024"),
        ("969,30,1", "969,30,1"),
    ],
)  # fmt: skip
def test_what_numbers_are(tmp_path, text, value):
    (tmp_path / "x.yaml").write_text(f"a: {text}\n")
    found = load_yaml(tmp_path / "x.yaml").data["a"]
    assert (found, type(found)) == (value, type(value))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(alphabet="ab01:-[]{}&*!|>'\"%#,._ \n\t", max_size=200))
def test_any_text_is_data_or_a_problem_with_its_line(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("fuzz") / "x.yaml"
    path.write_text(text)
    try:
        known, where = load_yaml(path, "x.yaml").data, "x.yaml"
    except YamlProblem as problem:
        known, where = {}, problem.where
    assert where.startswith("x.yaml")
    assert set(map(type, known)) <= {str}


def test_a_run_spec_of_another_hand_is_data(tmp_path):
    path = tmp_path / "spec.yaml"
    for text in ("version: 1\nrun: !!python/object/apply:os.system ['touch ran']\n", "a: " + "[" * 30_000, "1" * 9_000):
        path.write_text(text)
        with pytest.raises(SpecError):
            read_spec(path)
    assert not (tmp_path / "ran").exists()


def test_pyyaml_would_have_run_it(tmp_path):
    """The tags above are live ones: another loader runs them."""
    marker = tmp_path / "ran"
    yaml.load(f"!!python/object/apply:os.system ['touch {marker}']", Loader=yaml.UnsafeLoader)
    assert marker.exists()
