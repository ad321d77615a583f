"""Composition gives what Hydra gives: files of every shipped recipe merge alike, plain overrides are read alike."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra_merge import hydra_compose

from megalaunch.config.compose import compose, plain_scalar
from megalaunch.config.recipes import PACKAGED

RECIPES = sorted(path.stem for path in PACKAGED.glob("*.yaml"))
TYPED = [
    ("llama3_8b", {"parallel": "tp4pp4", "schedule": "wsd"}),
    ("quickstart", {"model": "tiny", "recompute": "selective", "optimizer": "adamw"}),
    ("llama3_70b", {"precision": "fp32", "platform": "a100_80gb", "parallel": "dp"}),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe):
    assert compose([f"recipe={recipe}"]).spec == hydra_compose(recipe, {})


@pytest.mark.parametrize(("recipe", "options"), TYPED)
def test_typed_options(recipe, options):
    overrides = [f"{group}={option}" for group, option in options.items()]
    assert compose([f"recipe={recipe}", *overrides]).spec == hydra_compose(recipe, options)


def test_recipes_that_start_from_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for name, defaults, body in (
        (
            "ground",
            "  - override /model: tiny\n  - override /schedule: wsd\n",
            "batch: {sequence_length: 8}\ntrain: {steps: 5}\n",
        ),
        (
            "left",
            "  - ground\n  - override /schedule: linear\n",
            "train: {steps: 6, seed: 1}\nmodel: {rope: {theta: 5.0}}\n",
        ),
        ("right", "  - ground\n  - override /parallel: tp2\n", "train: {seed: 2}\nbatch: {global_batch_size: 4}\n"),
        ("top", "  - left\n  - right\n  - override /recompute: selective\n", "recompute: {modules: [mlp]}\n"),
    ):
        text = f"# @package _global_\n# made\ndefaults:\n{defaults}  - _self_\n{body}"
        (tmp_path / "recipes" / f"{name}.yaml").write_text(text)
    spec = compose(["recipe=top"]).spec
    assert spec == hydra_compose("top", {})
    assert (spec.train.steps, spec.train.seed, spec.schedule.shape, spec.parallel.tp) == (6, 2, "linear", 2)
    assert spec.recompute.modules == ("mlp",)


@pytest.mark.parametrize(
    "text",
    ["1", "-1", "+1", "0", "007", "1_000", "1.5", "-2.", ".5", "1e3", "1E-3", "1.5e+10", "1e", "e1", "true", "True",
     "FALSE", "null", "Null",
     "nan", "inf", "-inf", "abc", "a1_b", "_x", "none", "on", "1a", "0x10", "1.2.3", "a.b", "a-b", "é"],
)  # fmt: skip
def test_plain_overrides(text):
    is_plain, value = plain_scalar(text)
    if is_plain:
        theirs = OverridesParser.create().parse_override(f"k={text}").value()
        assert (theirs, type(theirs)) == (value, type(value))


def test_most_overrides_need_no_grammar():
    assert all(plain_scalar(text)[0] for text in ("1", "-1", "3e-4", "1.0e-5", "true", "null", "cosine"))
