"""Everything that a package may override is checked on its own: what passes on passes, and what is lost is caught."""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from types import ModuleType

import pytest

from megalaunch.engine.operator_check import check_operators
from megalaunch.engine.platform.registry import get_platform
from megalaunch.kernels import overridable
from megalaunch.kernels.overridable import reference
from megalaunch.platform import overrides
from megalaunch.platform.overrides import OVERRIDABLE, Override


@pytest.fixture
def replace_all(monkeypatch):
    """Override these targets on the CPU: classes by subclasses, the others by functions that `change` what they give."""

    def replace(targets, change=lambda result: result) -> None:
        module = ModuleType("vendor_of_all")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        rows = []
        for target in targets:
            original, name = reference(target), target.replace(".", "_")
            if isinstance(original, type):
                setattr(module, name, type(name, (original,), {}))
            else:
                setattr(module, name, _calling(original, change))
            rows.append(Override(target, f"{module.__name__}:{name}", "cpu"))
        monkeypatch.setattr(overrides, "_registered", rows)
        monkeypatch.setattr(overridable, "_loaded", {})

    return replace


def _calling(original, change):
    @wraps(original)
    def call(*args, **kwargs):
        return change(original(*args, **kwargs))

    call.__signature__ = inspect.signature(original)
    return call


def test_an_override_of_anything_that_computes_the_same_is_right(replace_all):
    replace_all(OVERRIDABLE)
    found = list(check_operators(get_platform("cpu")))
    assert [(one.operator, one.problem) for one in found if not one.passed] == []
    assert {one.operator for one in found if one.implementation.startswith("vendor_of_all:")} == set(OVERRIDABLE)


def test_a_method_that_loses_a_gradient_is_wrong(replace_all):
    methods = [target for target, kind in OVERRIDABLE.items() if kind == "method"]
    replace_all(methods, lambda result: result.detach() + 0 * result)
    wrong = {one.operator for one in check_operators(get_platform("cpu")) if not one.passed}
    assert wrong == set(methods)
