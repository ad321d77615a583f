"""What is bound of Transformer Engine: its published signatures, and the messages where an installed one differs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import transformer_engine_stand_in as stand_in

from megalaunch.engine.precision.transformer_engine import UnknownTransformerEngine, load_transformer_engine
from megalaunch.schema.precision import Float8Spec

INSTALLED = importlib.util.find_spec("transformer_engine")


@pytest.fixture
def modules(monkeypatch):
    made = stand_in.transformer_engine_modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_the_stand_in_has_the_published_signatures():
    for path, parameters in stand_in.PUBLISHED.items():
        owner = stand_in
        for name in path.split("."):
            owner = getattr(owner, name)
        assert tuple(name for name in inspect.signature(owner).parameters if name != "self") == parameters


@pytest.mark.skipif(INSTALLED is None, reason="transformer-engine is not installed")
def test_the_published_signatures_are_those_of_the_installed_sources():
    """Read, not imported: the import needs CUDA."""
    root = Path(INSTALLED.origin).parent
    found = {}
    modules = ("pytorch/module/linear.py", "pytorch/module/grouped_linear.py", "pytorch/quantization.py")
    for file in (*modules, "common/recipe/__init__.py"):
        for node in ast.parse((root / file).read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = _parameters(node)
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        name = node.name if each.name == "__init__" else f"{node.name}.{each.name}"
                        found[name] = _parameters(each)
                    elif isinstance(each, ast.AnnAssign):
                        found.setdefault(f"{node.name} fields", []).append(each.target.id)
                    elif isinstance(each, ast.Assign):
                        found.setdefault(f"{node.name} members", []).append(each.targets[0].id)
    assert {path: tuple(found[path]) for path in stand_in.PUBLISHED} == stand_in.PUBLISHED
    for recipe in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        assert "fp8_format" in found[f"{recipe} fields"]
    assert {"E4M3", "HYBRID"} <= set(found["Format members"])


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args if argument.arg != "self"]


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
