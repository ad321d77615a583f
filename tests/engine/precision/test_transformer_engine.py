"""What is bound of Transformer Engine, and the messages where an installed one differs."""

from __future__ import annotations

import sys

import pytest
import transformer_engine_stand_in as stand_in

from megalaunch.engine.precision.transformer_engine import UnknownTransformerEngine, load_transformer_engine
from megalaunch.schema.precision import Float8Spec


@pytest.fixture
def modules(monkeypatch):
    made = stand_in.transformer_engine_modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize(
    ("settings", "recipe", "number_format"),
    [
        (Float8Spec(), stand_in.Float8CurrentScaling, stand_in.Format.HYBRID),
        (Float8Spec(recipe="blockwise", format="e4m3"), stand_in.Float8BlockScaling, stand_in.Format.E4M3),
        (Float8Spec(recipe="mxfp8"), stand_in.MXFP8BlockScaling, stand_in.Format.HYBRID),
    ],
)
def test_recipes(settings, recipe, number_format, modules):
    assert load_transformer_engine().make_recipe(settings) == recipe(fp8_format=number_format)


def test_the_recipe_of_delayed_scaling_has_margin_and_length(modules):
    settings = Float8Spec(recipe="delayed", format="e4m3", margin=2, amax_history_len=16)
    expected = stand_in.DelayedScaling(margin=2, fp8_format=stand_in.Format.E4M3, amax_history_len=16)
    assert load_transformer_engine().make_recipe(settings) == expected


def test_all_that_another_version_lacks_is_named(modules, monkeypatch):
    class Older(stand_in.Linear):
        def forward(self, inp): ...

    monkeypatch.setattr(modules["transformer_engine.pytorch"], "Linear", Older)
    monkeypatch.delattr(modules["transformer_engine.pytorch"], "autocast")
    monkeypatch.delattr(modules["transformer_engine.common.recipe"], "MXFP8BlockScaling")
    with pytest.raises(UnknownTransformerEngine) as refused:
        load_transformer_engine()
    assert str(refused.value) == (
        "the installed transformer_engine has no pytorch.Linear.forward(is_first_microbatch=), pytorch.autocast, "
        "common.recipe.MXFP8BlockScaling; install another version of it, or set precision.fp8.implementation=native"
    )


def test_an_import_that_fails_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UnknownTransformerEngine, match=r"cannot be imported \(ModuleNotFoundError: .*=native"):
        load_transformer_engine()
